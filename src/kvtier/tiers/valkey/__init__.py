"""Rows on a Valkey or Redis server: a backend for a tier that engines share."""

from kvtier.tiers.valkey.backend import ValkeyBackend

__all__ = ["ValkeyBackend"]
