/* `Blocks`, a table of block hashes: part of `_events.c`, which includes it. `hot.py` says what is promised. */
#ifndef KVTIER_BLOCKS_H
#define KVTIER_BLOCKS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "_slabs.h"

/* -- ints ------------------------------------------------------------------------------------------------------------------ */

/* Read an int from 0 to 2^64 - 1; return 0 for anything else, with no exception set. */
static inline int read_uint(PyObject *object, uint64_t *value) {
    if (!PyLong_CheckExact(object)) return 0;
#if PY_VERSION_HEX >= 0x030C0000
    if (PyUnstable_Long_IsCompact((PyLongObject *)object)) {
        Py_ssize_t compact = PyUnstable_Long_CompactValue((PyLongObject *)object);
        *value = (uint64_t)compact;
        return compact >= 0;
    }
#elif PyLong_SHIFT == 30
    const digit *digits = ((PyLongObject *)object)->ob_digit;
    switch (Py_SIZE(object)) {
    case 0: *value = 0; return 1;
    case 1: *value = digits[0]; return 1;
    case 2: *value = digits[0] | (uint64_t)digits[1] << 30; return 1;
    case 3: *value = digits[0] | (uint64_t)digits[1] << 30 | (uint64_t)digits[2] << 60; return digits[2] < 16;
    default: return 0;
    }
#endif
    *value = PyLong_AsUnsignedLongLong(object);
    if (*value == UINT64_MAX && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return 1;
}

/* Say whether an object is an int from 1 to 2^30 - 1, or some other that `token_of` can read: most tokens are. */
static inline int is_token(PyObject *object) {
#if PY_VERSION_HEX >= 0x030C0000
    return PyLong_CheckExact(object) && PyUnstable_Long_IsCompact((PyLongObject *)object) &&
           PyUnstable_Long_CompactValue((PyLongObject *)object) >= 0;
#else
    return PyLong_CheckExact(object) && Py_SIZE(object) == 1;
#endif
}

static inline uint32_t token_of(PyObject *object) {
#if PY_VERSION_HEX >= 0x030C0000
    return (uint32_t)PyUnstable_Long_CompactValue((PyLongObject *)object);
#else
    return ((PyLongObject *)object)->ob_digit[0];
#endif
}

/* -- room ------------------------------------------------------------------------------------------------------------------ */

/* Memory to work in, which grows and is kept. Each has one owner: an allocation may run the garbage collector, and so any thread. */
typedef struct {
    void *at;
    size_t size;
} Room;

static int make_room(Room *room, size_t size) {
    if (size <= room->size) return 0;
    void *grown = PyMem_Realloc(room->at, 2 * size);
    if (grown == NULL) return PyErr_NoMemory(), -1;
    room->at = grown;
    room->size = 2 * size;
    return 0;
}

/* -- blocks ------------------------------------------------------------------------------------------------------------------ */

/* Hashes and their numbers, in buckets of a cache line each. A hash is in its home or, where that was full, in the next bucket with room;
 * `passed` says how many went past a bucket so. The buckets are in parts, by the first bits of the mixed hash. A part is filled to two
 * thirds and then doubles, on its own; their sizes are spread from 1 to 2 times a power of two, so that one does after the other: a large
 * table grows as it fills, never at once, and no call has to move more than a small share of it. */
enum { SLOTS = 5, PART_BITS = 9, PARTS = 1 << PART_BITS, LEAST = 4 };

typedef struct {
    uint64_t hashes[SLOTS];
    uint32_t numbers[SLOTS], used : 3, passed : 29;
} Bucket;

typedef struct {
    Bucket *buckets;
    uint32_t used, size;
} Part;

typedef struct {
    PyObject_HEAD
    Part parts[PARTS];
    Room read; /* the hashes that a call is about */
} Blocks;

static PyTypeObject *blocks_type;
static Bucket no_buckets[1]; /* of every part that nothing was ever in */

static inline uint64_t mix(uint64_t hash) { return hash * 0x9E3779B97F4A7C15; }

static inline Part *part_of(Blocks *self, uint64_t hash) { return &self->parts[mix(hash) >> (64 - PART_BITS)]; }

static inline Bucket *home_of(const Part *part, uint64_t hash) {
    return &part->buckets[(mix(hash) << PART_BITS >> 32) * part->size >> 32];
}

static inline Bucket *after(const Part *part, Bucket *bucket) {
    return bucket + 1 == part->buckets + part->size ? part->buckets : bucket + 1;
}

static inline void fetch(Blocks *self, uint64_t hash) { __builtin_prefetch(home_of(part_of(self, hash), hash), 1); }

/* Return the bucket of a hash and where in it it is; NULL if it is nowhere. Where every bucket was passed, once round is enough. */
static inline Bucket *find_in(const Part *part, uint64_t hash, unsigned *place) {
    Bucket *bucket = home_of(part, hash);
    for (uint32_t left = part->size; left > 0; left--, bucket = after(part, bucket)) {
        unsigned same = 0; /* a bit for each slot; where the hash is cannot be foreseen, so there is no branch */
        for (unsigned i = 0; i < SLOTS; i++) same |= (unsigned)(bucket->hashes[i] == hash) << i;
        same &= (1u << bucket->used) - 1;
        if (same != 0) return *place = (unsigned)__builtin_ctz(same), bucket;
        if (bucket->passed == 0) return NULL;
    }
    return NULL;
}

/* Say whether a hash is there: like `find_in`, for those that most likely are not. */
static inline int is_in(const Part *part, uint64_t hash) {
    const Bucket *bucket = home_of(part, hash);
    for (uint32_t left = part->size; left > 0; left--, bucket = after(part, (Bucket *)bucket)) {
        for (unsigned i = 0; i < SLOTS; i++)
            if (bucket->hashes[i] == hash && i < bucket->used) return 1;
        if (bucket->passed == 0) return 0;
    }
    return 0;
}

/* Return the number of a hash, 0 if it is not there. */
static inline uint32_t number_of(Blocks *self, uint64_t hash) {
    unsigned place;
    const Bucket *bucket = find_in(part_of(self, hash), hash, &place);
    return bucket == NULL ? 0 : bucket->numbers[place];
}

/* Put a hash in that is not there; there is room. */
static inline void put_in(Part *part, uint64_t hash, uint32_t number) {
    Bucket *bucket = home_of(part, hash);
    for (; bucket->used == SLOTS; bucket = after(part, bucket)) bucket->passed++;
    bucket->hashes[bucket->used] = hash;
    bucket->numbers[bucket->used++] = number;
    part->used++;
}

/* Take out what is at a place; the last in the bucket takes it. */
static inline void empty(Part *part, Bucket *bucket, unsigned place) {
    for (Bucket *passed = home_of(part, bucket->hashes[place]); passed != bucket; passed = after(part, passed)) passed->passed--;
    unsigned last = --bucket->used;
    bucket->hashes[place] = bucket->hashes[last];
    bucket->numbers[place] = bucket->numbers[last];
    part->used--;
}

/* Take a hash out and return its number, 0 if it was not there. */
static inline uint32_t take_out(Blocks *self, uint64_t hash) {
    Part *part = part_of(self, hash);
    unsigned place;
    Bucket *bucket = find_in(part, hash, &place);
    if (bucket == NULL) return 0;
    uint32_t number = bucket->numbers[place];
    empty(part, bucket, place);
    return number;
}

static Bucket *make_buckets(size_t count) {
    size_t size = count * sizeof(Bucket);
    void *buckets = is_stretch(size) ? take_stretch(size) : aligned_alloc(sizeof(Bucket), size);
    return buckets == NULL ? PyErr_NoMemory(), NULL : memset(buckets, 0, size);
}

static void free_buckets(Bucket *buckets, size_t count) {
    if (buckets == no_buckets) return;
    if (is_stretch(count * sizeof(Bucket))) give_stretch(buckets, count * sizeof(Bucket));
    else free(buckets);
}

/* Double a part. */
static int grow(Blocks *self, Part *part) {
    Part old = *part;
    uint64_t power = old.buckets == no_buckets ? LEAST : 2ull << (31 - __builtin_clz(old.size));
    part->size = (uint32_t)(power * (uint64_t)(PARTS + (part - self->parts)) / PARTS);
    part->buckets = make_buckets(part->size);
    if (part->buckets == NULL) return *part = old, -1;
    part->used = 0;
    for (const Bucket *bucket = old.buckets; bucket < old.buckets + old.size; bucket++)
        for (unsigned i = 0; i < bucket->used; i++) put_in(part, bucket->hashes[i], bucket->numbers[i]);
    free_buckets(old.buckets, old.size);
    return 0;
}

/* Give a part room for one more. */
static inline int reserve(Blocks *self, Part *part) {
    return 3 * (size_t)part->used < 10 * (size_t)part->size && part->buckets != no_buckets ? 0 : grow(self, part);
}

/* Give a hash a number, whether it has one or not. */
static int set_number(Blocks *self, uint64_t hash, uint32_t number) {
    Part *part = part_of(self, hash);
    unsigned place;
    Bucket *bucket = find_in(part, hash, &place);
    if (bucket != NULL) return bucket->numbers[place] = number, 0;
    if (reserve(self, part) < 0) return -1;
    return put_in(part, hash, number), 0;
}

/* Give new hashes a number, and add them up: 1. If one is there already, or memory is short, change nothing: 0, -1. */
static int hold_all(Blocks *self, const uint64_t *hashes, Py_ssize_t size, uint32_t number, uint64_t *sum) {
    Py_ssize_t done = 0;
    int status = 1;
    for (; done < size; done++) {
        Part *part = part_of(self, hashes[done]);
        status = reserve(self, part) < 0 ? -1 : is_in(part, hashes[done]) ? 0 : 1;
        if (status != 1) break;
        put_in(part, hashes[done], number);
        *sum += hashes[done];
    }
    while (status != 1 && done--) take_out(self, hashes[done]);
    return status;
}

static int read_hash(PyObject *object, uint64_t *hash) {
    if (read_uint(object, hash)) return 0;
    PyErr_Format(PyExc_TypeError, "a block hash is an int from 0 to 2^64 - 1 here, not %.100R", object);
    return -1;
}

/* Read the hashes of a list or tuple, and fetch their slots; return how many, -1 with an exception set. */
static Py_ssize_t read_hashes(Blocks *self, PyObject *hashes) {
    if (!PyList_CheckExact(hashes) && !PyTuple_CheckExact(hashes))
        return PyErr_Format(PyExc_TypeError, "expected a list or tuple of block hashes, not %.100R", hashes), -1;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(hashes);
    if (make_room(&self->read, (size_t)count * sizeof(uint64_t)) < 0) return -1;
    uint64_t *read = self->read.at;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (read_hash(PySequence_Fast_GET_ITEM(hashes, i), &read[i]) < 0) return -1;
        fetch(self, read[i]);
    }
    return count;
}

static int read_number(PyObject *object, uint32_t *number) {
    unsigned long value = PyLong_AsUnsignedLong(object);
    if (value == (unsigned long)-1 && PyErr_Occurred()) return -1;
    *number = (uint32_t)value;
    if (value > 0 && value <= UINT32_MAX) return 0;
    return PyErr_Format(PyExc_OverflowError, "expected a number from 1 to 2^32 - 1, not %lu", value), -1;
}

static PyObject *hold(Blocks *self, PyObject *const *arguments, Py_ssize_t count) {
    uint32_t number;
    uint64_t sum = 0;
    if (count != 2) return PyErr_SetString(PyExc_TypeError, "expected hashes and a number"), NULL;
    Py_ssize_t size = read_hashes(self, arguments[0]);
    if (size < 0 || read_number(arguments[1], &number) < 0) return NULL;
    int held = hold_all(self, self->read.at, size, number, &sum);
    return held < 0 ? NULL : held == 0 ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(sum);
}

/* Append `(number, times)`; -1 with an exception set. */
static int add_run(PyObject *runs, uint32_t number, Py_ssize_t times) {
    PyObject *run = times == 0 ? NULL : Py_BuildValue("In", number, times);
    int status = times == 0 ? 0 : run == NULL ? -1 : PyList_Append(runs, run);
    Py_XDECREF(run);
    return status;
}

/* Take out the hashes that were read; list those that were there in `gone` unless all were, and their numbers in `runs`. */
static int drop_all(Blocks *self, PyObject *names, Py_ssize_t size, PyObject **gone, PyObject *runs, uint64_t *sum) {
    uint64_t *hashes = self->read.at;
    uint32_t last = 0;
    Py_ssize_t times = 0;
    for (Py_ssize_t i = 0; i < size; i++) {
        uint32_t number = take_out(self, hashes[i]);
        if (number == 0) {
            if (*gone == NULL && (*gone = PyList_GetSlice(names, 0, i)) == NULL) return -1;
            continue;
        }
        if (*gone != NULL && PyList_Append(*gone, PyList_GET_ITEM(names, i)) < 0) return -1;
        *sum += hashes[i];
        if (number != last && add_run(runs, last, times) < 0) return -1;
        times = number == last ? times + 1 : 1;
        last = number;
    }
    return add_run(runs, last, times);
}

static PyObject *drop(Blocks *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2 || !PyList_CheckExact(arguments[0]) || !Py_IS_TYPE(arguments[1], blocks_type))
        return PyErr_SetString(PyExc_TypeError, "expected a list of hashes and a table of the same kind"), NULL;
    PyObject *names = arguments[0], *gone = NULL;
    Py_ssize_t size = read_hashes(self, names);
    for (Py_ssize_t i = 0; i < size; i++)
        if (number_of((Blocks *)arguments[1], ((uint64_t *)self->read.at)[i]) != 0) Py_RETURN_NONE;
    PyObject *runs = size < 0 ? NULL : PyList_New(0);
    uint64_t sum = 0;
    if (runs == NULL) return NULL;
    if (drop_all(self, names, size, &gone, runs, &sum) == 0)
        return Py_BuildValue("KNN", (unsigned long long)sum, gone != NULL ? gone : Py_NewRef(names), runs);
    Py_XDECREF(gone);
    Py_DECREF(runs);
    return NULL;
}

static PyObject *get(Blocks *self, PyObject *object) {
    uint64_t hash;
    return read_hash(object, &hash) < 0 ? NULL : PyLong_FromUnsignedLong(number_of(self, hash));
}

static PyObject *put_number(Blocks *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t hash;
    uint32_t number;
    if (count != 2) return PyErr_SetString(PyExc_TypeError, "expected a hash and a number"), NULL;
    if (read_hash(arguments[0], &hash) < 0 || read_number(arguments[1], &number) < 0) return NULL;
    return set_number(self, hash, number) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *pop(Blocks *self, PyObject *object) {
    uint64_t hash;
    return read_hash(object, &hash) < 0 ? NULL : PyLong_FromUnsignedLong(take_out(self, hash));
}

static PyObject *count_of(Blocks *self, PyObject *const *arguments, Py_ssize_t count) {
    uint32_t number;
    if (count != 2) return PyErr_SetString(PyExc_TypeError, "expected hashes and a number"), NULL;
    Py_ssize_t size = read_hashes(self, arguments[0]), found = 0;
    if (size < 0 || read_number(arguments[1], &number) < 0) return NULL;
    for (Py_ssize_t i = 0; i < size; i++) found += number_of(self, ((uint64_t *)self->read.at)[i]) == number;
    return PyLong_FromSsize_t(found);
}

static PyObject *make_blocks(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    (void)keywords;
    if (PyTuple_GET_SIZE(arguments) != 0) return PyErr_SetString(PyExc_TypeError, "Blocks() takes no arguments"), NULL;
    Blocks *self = (Blocks *)type->tp_alloc(type, 0);
    for (int i = 0; i < PARTS && self != NULL; i++) self->parts[i] = (Part){no_buckets, 0, 1};
    return (PyObject *)self;
}

static PyObject *copy(Blocks *self, PyObject *unused) {
    (void)unused;
    Blocks *made = (Blocks *)PyObject_CallNoArgs((PyObject *)Py_TYPE(self));
    for (int i = 0; i < PARTS && made != NULL; i++) {
        const Part *part = &self->parts[i];
        if (part->buckets == no_buckets) continue;
        Bucket *buckets = make_buckets(part->size);
        if (buckets == NULL) return Py_DECREF(made), NULL;
        made->parts[i] = (Part){memcpy(buckets, part->buckets, part->size * sizeof(Bucket)), part->used, part->size};
    }
    return (PyObject *)made;
}

static void free_blocks(Blocks *self) {
    PyTypeObject *type = Py_TYPE(self);
    for (int i = 0; i < PARTS; i++) free_buckets(self->parts[i].buckets, self->parts[i].size);
    PyMem_Free(self->read.at);
    type->tp_free(self);
    Py_DECREF(type);
}

static Py_ssize_t length(Blocks *self) {
    Py_ssize_t used = 0;
    for (int i = 0; i < PARTS; i++) used += self->parts[i].used;
    return used;
}

static PyMethodDef blocks_methods[] = {
    {"hold", (PyCFunction)(void (*)(void))hold, METH_FASTCALL, NULL},
    {"drop", (PyCFunction)(void (*)(void))drop, METH_FASTCALL, NULL},
    {"get", (PyCFunction)get, METH_O, NULL},
    {"put", (PyCFunction)(void (*)(void))put_number, METH_FASTCALL, NULL},
    {"pop", (PyCFunction)pop, METH_O, NULL},
    {"count", (PyCFunction)(void (*)(void))count_of, METH_FASTCALL, NULL},
    {"copy", (PyCFunction)copy, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot blocks_slots[] = {
    {Py_tp_new, make_blocks}, {Py_tp_dealloc, free_blocks}, {Py_tp_methods, blocks_methods}, {Py_sq_length, length}, {0, NULL}};
static PyType_Spec blocks_spec = {"kvtier._events.Blocks", sizeof(Blocks), 0, Py_TPFLAGS_DEFAULT, blocks_slots};

#endif
