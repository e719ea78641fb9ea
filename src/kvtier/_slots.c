/* What `kvtier.policies.slots` is built on, without a Python call for each chunk: keys -> slots and back (Index), keys that were
 * evicted (Ghosts), slots in order of use (Recency). Optional: where this was not compiled, the classes named Python… there do
 * the same. tests/unit/test_slots.py holds the two against each other.
 *
 * The keys of a prompt are a thousand lookups in memory that is cold. They are taken a few at a time, and what they will need is
 * fetched ahead, so that they wait for memory together and not one after the other. Numbers go in and out as numpy arrays,
 * which are seen as plain buffers; nothing here outlives a call but what an object owns.
 */
#define Py_LIMITED_API 0x030B0000 /* one binary for every Python from 3.11 on */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { AHEAD = 32, NONE = -1 };

/* -- numpy arrays as buffers ----------------------------------------------------------------------------------------------- */

typedef struct {
    Py_buffer view;
    char *data;
    Py_ssize_t count, stride;
} Array;

/* Borrow a one-dimensional array with items of `size` bytes; -1 with an exception set if it is none. */
static int borrow(PyObject *object, Py_ssize_t size, int writable, Array *array) {
    if (PyObject_GetBuffer(object, &array->view, writable ? PyBUF_STRIDED : PyBUF_STRIDED_RO) < 0) return -1;
    if (array->view.ndim != 1 || array->view.itemsize != size) {
        PyErr_Format(PyExc_ValueError, "expected an array of one dimension with items of %zd bytes", size);
        PyBuffer_Release(&array->view);
        return -1;
    }
    array->data = array->view.buf;
    array->count = array->view.shape[0];
    array->stride = array->view.strides[0];
    return 0;
}

static void give_back(Array *array) { PyBuffer_Release(&array->view); }

static inline int64_t get(const Array *array, Py_ssize_t i) { return *(int64_t *)(array->data + i * array->stride); }
static inline void set(const Array *array, Py_ssize_t i, int64_t value) {
    *(int64_t *)(array->data + i * array->stride) = value;
}

/* Check that all slots lie in a range; -1 with an exception set if not. */
static int check_slots(const Array *slots, Py_ssize_t limit) {
    for (Py_ssize_t i = 0; i < slots->count; i++) {
        if (get(slots, i) < 0 || get(slots, i) >= limit) {
            PyErr_Format(PyExc_IndexError, "expected slots from 0 to %zd, got %lld", limit - 1, (long long)get(slots, i));
            return -1;
        }
    }
    return 0;
}

/* -- keys and their hashes ----------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject *object;
    const char *bytes;
    Py_ssize_t size;
} Key;

/* Read a key, which may be NULL with an exception set; -1 with an exception set if it is none. */
static int read_key(PyObject *object, Key *key) {
    key->object = object;
    return object == NULL ? -1 : PyBytes_AsStringAndSize(object, (char **)&key->bytes, &key->size);
}

static int same(const Key *some, const Key *other) {
    return some->object == other->object ||
           (some->size == other->size && memcmp(some->bytes, other->bytes, (size_t)some->size) == 0);
}

static uint64_t secrets[2]; /* drawn when the module is loaded */

static inline uint64_t word(const char *bytes) {
    uint64_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

static inline uint64_t mix(uint64_t a, uint64_t b) {
    __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Hash a key, 16 bytes at a time, with secrets: whoever can choose keys cannot tell which of them collide. */
static uint64_t hash_key(const Key *key) {
    char padded[16] = {0};
    const char *bytes = key->bytes, *last = padded;
    uint64_t hash = secrets[0] ^ (uint64_t)key->size;
    if (key->size < 16) {
        bytes = memcpy(padded, key->bytes, (size_t)key->size);
    } else {
        last = bytes + key->size - 16;
    }
    for (; bytes < last; bytes += 16) hash = mix(word(bytes) ^ secrets[1], word(bytes + 8) ^ hash);
    hash = mix(word(last) ^ secrets[1], word(last + 8) ^ hash);
    return mix(hash, secrets[0]);
}

/* -- a table from hashes to slots ------------------------------------------------------------------------------------------ */

typedef struct {
    uint32_t tag; /* of a hash, the upper half */
    int32_t slot; /* NONE: empty */
} Entry;

/* Open addressing with linear probing, at most half full. An entry's home is its tag, so that entries can move on deletion. */
typedef struct {
    uint32_t mask;
    Entry *entries;
    uint32_t *tags; /* by slot */
} Table;

static inline uint32_t tag_of(uint64_t hash) { return (uint32_t)(hash >> 32); }
static inline Entry *home(const Table *table, uint32_t tag) { return table->entries + (tag & table->mask); }

/* Return a power of two that is at least twice `count`. */
static size_t table_size(Py_ssize_t count) {
    size_t size = 8;
    while (size < 2 * (size_t)count) size *= 2;
    return size;
}

static int make_table(Table *table, Py_ssize_t num_slots) {
    size_t size = table_size(num_slots);
    table->mask = (uint32_t)size - 1;
    table->entries = PyMem_Malloc(size * sizeof *table->entries);
    table->tags = PyMem_Calloc((size_t)num_slots + 1, sizeof *table->tags);
    if (table->entries == NULL || table->tags == NULL) return -1;
    memset(table->entries, 0xff, size * sizeof *table->entries);
    return 0;
}

static void free_table(Table *table) {
    PyMem_Free(table->entries);
    PyMem_Free(table->tags);
}

static void put(Table *table, uint32_t tag, int32_t slot) {
    uint32_t i = tag & table->mask;
    while (table->entries[i].slot != NONE) i = (i + 1) & table->mask;
    table->entries[i] = (Entry){tag, slot};
    table->tags[slot] = tag;
}

/* Delete a slot that is in the table. */
static void cut(Table *table, int32_t slot) {
    uint32_t mask = table->mask, hole = table->tags[slot] & mask;
    while (table->entries[hole].slot != slot) hole = (hole + 1) & mask;
    for (uint32_t i = (hole + 1) & mask; table->entries[i].slot != NONE; i = (i + 1) & mask) {
        /* An entry moves into the hole unless its home lies behind it. */
        if (((i - table->entries[i].tag) & mask) >= ((i - hole) & mask)) {
            table->entries[hole] = table->entries[i];
            hole = i;
        }
    }
    table->entries[hole].slot = NONE;
}

/* -- Index: keys -> slots -------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Py_ssize_t num_slots, used;
    Table table;
    Key *keys; /* by slot */
    uint32_t *marks, mark;
} Index;

/* Keys that are being looked up, and what was found. */
typedef struct {
    Key keys[AHEAD];
    uint32_t tags[AHEAD];
    int32_t slots[AHEAD];
} Some;

static int32_t find_one(const Index *self, const Key *key, uint32_t tag) {
    const Entry *entries = self->table.entries;
    for (uint32_t i = tag & self->table.mask; entries[i].slot != NONE; i = (i + 1) & self->table.mask) {
        if (entries[i].tag == tag && same(self->keys + entries[i].slot, key)) return entries[i].slot;
    }
    return NONE;
}

/* Find up to AHEAD keys of a list, beginning at `start`; return how many were tried, or -1 with an exception set. */
static Py_ssize_t find_some(const Index *self, PyObject *list, Py_ssize_t start, Some *some) {
    Py_ssize_t count = PyList_Size(list) - start;
    if (count > AHEAD) count = AHEAD;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (read_key(PyList_GetItem(list, start + i), some->keys + i) < 0) return -1;
        some->tags[i] = tag_of(hash_key(some->keys + i));
        __builtin_prefetch(home(&self->table, some->tags[i]));
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        Entry entry = *home(&self->table, some->tags[i]);
        some->slots[i] = entry.tag == some->tags[i] ? entry.slot : NONE; /* a guess, most often right */
        if (some->slots[i] != NONE) __builtin_prefetch(self->keys + entry.slot);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (some->slots[i] != NONE) __builtin_prefetch(self->keys[some->slots[i]].bytes);
    }
    for (Py_ssize_t i = 0; i < count; i++) some->slots[i] = find_one(self, some->keys + i, some->tags[i]);
    return count;
}

/* Fetch what deleting up to AHEAD slots will need. */
static void fetch_ahead(const Index *self, const Array *slots, Py_ssize_t start) {
    for (Py_ssize_t i = start; i < slots->count && i < start + AHEAD; i++) {
        int64_t slot = get(slots, i);
        if (self->keys[slot].object == NULL) continue;
        __builtin_prefetch(home(&self->table, self->table.tags[slot]), 1);
        __builtin_prefetch(self->keys[slot].object, 1);
    }
}

/* Delete a slot that has a key and hand over the reference to it. */
static PyObject *delete_one(Index *self, int32_t slot) {
    PyObject *key = self->keys[slot].object;
    cut(&self->table, slot);
    self->keys[slot].object = NULL;
    self->used--;
    return key;
}

static void insert_one(Index *self, const Key *key, uint32_t tag, int32_t slot) {
    if (self->keys[slot].object != NULL) Py_DECREF(delete_one(self, slot));
    put(&self->table, tag, slot);
    self->keys[slot] = *key;
    Py_INCREF(key->object);
    self->used++;
}

/* Fill `out` with the slots of keys and return how many it got, or -1 with an exception set. */
typedef Py_ssize_t Fill(Index *self, PyObject *keys, const Array *out);

static Py_ssize_t fill_find(Index *self, PyObject *keys, const Array *out) {
    Some some;
    Py_ssize_t start = 0, found = 0, tried;
    while ((tried = find_some(self, keys, start, &some)) > 0) {
        for (Py_ssize_t i = 0; i < tried; i++) {
            found += some.slots[i] != NONE;
            set(out, start++, some.slots[i]);
        }
    }
    return tried < 0 ? -1 : found;
}

static Py_ssize_t fill_leading(Index *self, PyObject *keys, const Array *out) {
    Some some;
    Py_ssize_t done = 0, tried;
    while ((tried = find_some(self, keys, done, &some)) > 0) {
        for (Py_ssize_t i = 0; i < tried; i++) {
            if (some.slots[i] == NONE) return done;
            set(out, done++, some.slots[i]);
        }
    }
    return tried < 0 ? -1 : done;
}

/* Choose a mark that no slot has. */
static void new_mark(Index *self) {
    if (++self->mark != 0) return;
    memset(self->marks, 0, (size_t)self->num_slots * sizeof *self->marks);
    self->mark = 1;
}

static Py_ssize_t fill_held(Index *self, PyObject *keys, const Array *out) {
    Some some;
    Py_ssize_t done = 0, start = 0, tried;
    new_mark(self);
    while ((tried = find_some(self, keys, start, &some)) > 0) {
        start += tried;
        for (Py_ssize_t i = 0; i < tried; i++) {
            int32_t slot = some.slots[i];
            if (slot == NONE || self->marks[slot] == self->mark) continue;
            self->marks[slot] = self->mark;
            set(out, done++, slot);
        }
    }
    return tried < 0 ? -1 : done;
}

static PyObject *call_fill(PyObject *self, PyObject *args, Fill *fill) {
    PyObject *keys, *array;
    Array out;
    Py_ssize_t done = -1;
    if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &keys, &array) || borrow(array, 8, 1, &out) < 0) return NULL;
    if (out.count < PyList_Size(keys)) {
        PyErr_SetString(PyExc_ValueError, "expected room for the slots of all keys");
    } else {
        done = fill((Index *)self, keys, &out);
    }
    give_back(&out);
    return done < 0 ? NULL : PyLong_FromSsize_t(done);
}

static PyObject *index_find(PyObject *self, PyObject *args) { return call_fill(self, args, fill_find); }
static PyObject *index_leading(PyObject *self, PyObject *args) { return call_fill(self, args, fill_leading); }
static PyObject *index_held(PyObject *self, PyObject *args) { return call_fill(self, args, fill_held); }

/* Keys without a slot, each once; `table` maps tags to places in `keys`. */
typedef struct {
    Key *keys;
    Py_ssize_t count;
    Entry *table;
    uint32_t mask;
} Missing;

static void note_missing(Missing *missing, const Key *key, uint32_t tag) {
    uint32_t i = tag & missing->mask;
    for (; missing->table[i].slot != NONE; i = (i + 1) & missing->mask) {
        if (missing->table[i].tag == tag && same(missing->keys + missing->table[i].slot, key)) return;
    }
    missing->table[i] = (Entry){tag, (int32_t)missing->count};
    missing->keys[missing->count++] = *key;
}

static PyObject *list_missing(const Index *self, PyObject *keys, Missing *missing) {
    Some some;
    Py_ssize_t start = 0, tried;
    while ((tried = find_some(self, keys, start, &some)) > 0) {
        for (Py_ssize_t i = 0; i < tried; i++) {
            if (some.slots[i] == NONE) note_missing(missing, some.keys + i, some.tags[i]);
        }
        start += tried;
    }
    PyObject *list = tried < 0 ? NULL : PyList_New(missing->count);
    for (Py_ssize_t i = 0; list != NULL && i < missing->count; i++) PyList_SetItem(list, i, Py_NewRef(missing->keys[i].object));
    return list;
}

static PyObject *index_missing(PyObject *self, PyObject *keys) {
    if (!PyList_Check(keys)) return PyErr_Format(PyExc_TypeError, "expected a list of keys");
    size_t count = (size_t)PyList_Size(keys), size = table_size((Py_ssize_t)count);
    Missing missing = {PyMem_Malloc((count + 1) * sizeof(Key)), 0, PyMem_Malloc(size * sizeof(Entry)), (uint32_t)size - 1};
    PyObject *list = NULL;
    if (missing.keys == NULL || missing.table == NULL) {
        PyErr_NoMemory();
    } else {
        memset(missing.table, 0xff, size * sizeof *missing.table);
        list = list_missing((Index *)self, keys, &missing);
    }
    PyMem_Free(missing.keys);
    PyMem_Free(missing.table);
    return list;
}

static PyObject *index_get(PyObject *self, PyObject *key) {
    Key query;
    if (read_key(key, &query) < 0) return NULL;
    int32_t slot = find_one((Index *)self, &query, tag_of(hash_key(&query)));
    return slot == NONE ? Py_NewRef(Py_None) : PyLong_FromLong(slot);
}

static int add_all(Index *self, PyObject *keys, const Array *slots) {
    Some some;
    Py_ssize_t start = 0, tried;
    if (PyList_Size(keys) != slots->count) {
        PyErr_SetString(PyExc_ValueError, "expected a slot for each key");
        return -1;
    }
    if (check_slots(slots, self->num_slots) < 0) return -1;
    while ((tried = find_some(self, keys, start, &some)) > 0) {
        fetch_ahead(self, slots, start);
        for (Py_ssize_t i = 0; i < tried; i++, start++) {
            if (find_one(self, some.keys + i, some.tags[i]) != NONE) { /* again: it may be an earlier key of this call */
                PyErr_SetString(PyExc_ValueError, "expected keys without a slot");
                return -1;
            }
            insert_one(self, some.keys + i, some.tags[i], (int32_t)get(slots, start));
        }
    }
    return (int)tried;
}

static PyObject *index_add(PyObject *self, PyObject *args) {
    PyObject *keys, *array;
    Array slots;
    if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &keys, &array) || borrow(array, 8, 0, &slots) < 0) return NULL;
    int status = add_all((Index *)self, keys, &slots);
    give_back(&slots);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

/* Return the keys of slots that have one; with `and_delete`, the slots are empty afterwards. */
static PyObject *list_keys(Index *self, PyObject *array, int and_delete) {
    Array slots;
    if (borrow(array, 8, 0, &slots) < 0) return NULL;
    PyObject *list = check_slots(&slots, self->num_slots) < 0 ? NULL : PyList_New(0);
    for (Py_ssize_t i = 0; list != NULL && i < slots.count; i++) {
        if (i % AHEAD == 0) fetch_ahead(self, &slots, i);
        int32_t slot = (int32_t)get(&slots, i);
        if (self->keys[slot].object == NULL) continue;
        PyObject *key = and_delete ? delete_one(self, slot) : Py_NewRef(self->keys[slot].object);
        if (PyList_Append(list, key) < 0) Py_CLEAR(list);
        Py_DECREF(key);
    }
    give_back(&slots);
    return list;
}

static PyObject *index_keys(PyObject *self, PyObject *array) { return list_keys((Index *)self, array, 0); }
static PyObject *index_remove(PyObject *self, PyObject *array) { return list_keys((Index *)self, array, 1); }

/* Count the slots, each once, that `allowed` is true of; -1 with an exception set if one is out of range. */
static Py_ssize_t count_allowed(Index *self, const Array *slots, const Array *allowed) {
    Py_ssize_t count = 0;
    if (check_slots(slots, self->num_slots < allowed->count ? self->num_slots : allowed->count) < 0) return -1;
    new_mark(self);
    for (Py_ssize_t i = 0; i < slots->count; i++) {
        int64_t slot = get(slots, i);
        count += self->marks[slot] != self->mark && allowed->data[slot * allowed->stride];
        self->marks[slot] = self->mark;
    }
    return count;
}

static PyObject *index_count(PyObject *self, PyObject *args) {
    PyObject *array, *mask;
    Array slots, allowed;
    Py_ssize_t count = -1;
    if (!PyArg_ParseTuple(args, "OO", &array, &mask) || borrow(array, 8, 0, &slots) < 0) return NULL;
    if (borrow(mask, 1, 0, &allowed) == 0) {
        count = count_allowed((Index *)self, &slots, &allowed);
        give_back(&allowed);
    }
    give_back(&slots);
    return count < 0 ? NULL : PyLong_FromSsize_t(count);
}

static Py_ssize_t index_length(PyObject *self) { return ((Index *)self)->used; }

static int index_contains(PyObject *self, PyObject *key) {
    Key query;
    if (read_key(key, &query) < 0) return -1;
    return find_one((Index *)self, &query, tag_of(hash_key(&query))) != NONE;
}

static void free_object(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static void index_dealloc(PyObject *object) {
    Index *self = (Index *)object;
    for (Py_ssize_t slot = 0; self->keys != NULL && slot < self->num_slots; slot++) Py_XDECREF(self->keys[slot].object);
    free_table(&self->table);
    PyMem_Free(self->keys);
    PyMem_Free(self->marks);
    free_object(object);
}

/* Read the one argument of a constructor, a number of slots. */
static int parse_capacity(PyObject *args, Py_ssize_t *capacity) {
    if (!PyArg_ParseTuple(args, "n", capacity)) return -1;
    if (*capacity >= 0 && *capacity < INT32_MAX / 4) return 0;
    PyErr_Format(PyExc_ValueError, "expected a capacity of 0 to %d slots, got %zd", INT32_MAX / 4 - 1, *capacity);
    return -1;
}

static PyObject *new_object(PyTypeObject *type) { return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0); }

static PyObject *index_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Py_ssize_t num_slots;
    (void)kwargs;
    if (parse_capacity(args, &num_slots) < 0) return NULL;
    Index *self = (Index *)new_object(type);
    if (self == NULL) return NULL;
    self->num_slots = num_slots;
    self->keys = PyMem_Calloc((size_t)num_slots + 1, sizeof *self->keys);
    self->marks = PyMem_Calloc((size_t)num_slots + 1, sizeof *self->marks);
    if (make_table(&self->table, num_slots) < 0 || self->keys == NULL || self->marks == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static PyMethodDef index_methods[] = {
    {"find_into", index_find, METH_VARARGS, "find_into(keys, out) -> number of keys that have a slot. It goes to `out`, else -1."},
    {"leading_into", index_leading, METH_VARARGS, "leading_into(keys, out) -> number of leading keys that have a slot."},
    {"held_into", index_held, METH_VARARGS, "held_into(keys, out) -> number of distinct slots that the keys have."},
    {"missing", index_missing, METH_O, "missing(keys) -> the keys without a slot, each once."},
    {"get", index_get, METH_O, "get(key) -> its slot, or None."},
    {"add", index_add, METH_VARARGS, "add(keys, slots). The keys are new; a key that a slot had is forgotten."},
    {"keys", index_keys, METH_O, "keys(slots) -> the keys of those that have one."},
    {"count", index_count, METH_VARARGS, "count(slots, allowed) -> number of different slots that are allowed."},
    {"remove", index_remove, METH_O, "remove(slots) -> the keys that they had."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot index_slots[] = {
    {Py_tp_new, index_new},          {Py_tp_dealloc, index_dealloc},         {Py_tp_methods, index_methods},
    {Py_mp_length, index_length},    {Py_sq_contains, index_contains},       {0, NULL},
};
static PyType_Spec index_spec = {
    "kvtier._slots.Index", sizeof(Index), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, index_slots,
};

/* -- Ghosts: keys that were evicted from two lists ------------------------------------------------------------------------- */

/* A ring of hashes for each list; a slot is a place in one of them. Keys are told apart by 64 bits of a secret hash: a mistake
 * in 2^64 costs a policy one bad guess, and no key has to be kept alive. */
typedef struct {
    PyObject_HEAD
    Py_ssize_t capacity, next[2], sizes[2];
    Table table;
    uint64_t *hashes; /* by slot */
    uint8_t *taken;
} Ghosts;

static int32_t find_ghost(const Ghosts *self, uint64_t hash) {
    const Entry *entries = self->table.entries;
    for (uint32_t i = tag_of(hash) & self->table.mask; entries[i].slot != NONE; i = (i + 1) & self->table.mask) {
        if (entries[i].tag == tag_of(hash) && self->hashes[entries[i].slot] == hash) return entries[i].slot;
    }
    return NONE;
}

static void forget_ghost(Ghosts *self, int32_t slot) {
    cut(&self->table, slot);
    self->taken[slot] = 0;
    self->sizes[slot >= self->capacity]--;
}

static void add_ghost(Ghosts *self, int which, uint64_t hash) {
    int32_t slot = (int32_t)(which * self->capacity + self->next[which]), known = find_ghost(self, hash);
    if (known != NONE) forget_ghost(self, known);
    if (self->taken[slot]) forget_ghost(self, slot);
    put(&self->table, tag_of(hash), slot);
    self->hashes[slot] = hash;
    self->taken[slot] = 1;
    self->sizes[which]++;
    self->next[which] = (self->next[which] + 1) % self->capacity;
}

/* Hash up to AHEAD keys of a list, beginning at `start`; return how many, or -1 with an exception set. */
static Py_ssize_t hash_some(const Ghosts *self, PyObject *list, Py_ssize_t start, uint64_t *hashes) {
    Key key;
    Py_ssize_t count = PyList_Size(list) - start;
    if (count > AHEAD) count = AHEAD;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (read_key(PyList_GetItem(list, start + i), &key) < 0) return -1;
        hashes[i] = hash_key(&key);
        __builtin_prefetch(home(&self->table, tag_of(hashes[i])));
    }
    return count;
}

static PyObject *ghosts_remember(PyObject *object, PyObject *args) {
    Ghosts *self = (Ghosts *)object;
    PyObject *list;
    int which;
    uint64_t hashes[AHEAD];
    Py_ssize_t start = 0, count;
    if (!PyArg_ParseTuple(args, "iO!", &which, &PyList_Type, &list)) return NULL;
    if (which < 0 || which > 1) return PyErr_Format(PyExc_ValueError, "expected list 0 or 1, got %d", which);
    if (self->capacity == 0) return Py_NewRef(Py_None);
    while ((count = hash_some(self, list, start, hashes)) > 0) {
        for (Py_ssize_t i = 0; i < count; i++) add_ghost(self, which, hashes[i]);
        start += count;
    }
    return count < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *ghosts_recall(PyObject *object, PyObject *args) {
    Ghosts *self = (Ghosts *)object;
    PyObject *list, *array;
    Array out;
    uint64_t hashes[AHEAD];
    Py_ssize_t start = 0, found = 0, count = -1;
    if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &list, &array) || borrow(array, 8, 1, &out) < 0) return NULL;
    if (out.count < PyList_Size(list)) PyErr_SetString(PyExc_ValueError, "expected room for an answer for each key");
    while (out.count >= PyList_Size(list) && (count = hash_some(self, list, start, hashes)) > 0) {
        for (Py_ssize_t i = 0; i < count; i++) {
            int32_t slot = find_ghost(self, hashes[i]);
            set(&out, start++, slot == NONE ? NONE : slot >= self->capacity);
            if (slot == NONE) continue;
            forget_ghost(self, slot);
            found++;
        }
    }
    give_back(&out);
    return count < 0 ? NULL : PyLong_FromSsize_t(found);
}

static PyObject *ghosts_sizes(PyObject *object, PyObject *unused) {
    (void)unused;
    return Py_BuildValue("(nn)", ((Ghosts *)object)->sizes[0], ((Ghosts *)object)->sizes[1]);
}

static PyObject *ghosts_clear(PyObject *object, PyObject *unused) {
    Ghosts *self = (Ghosts *)object;
    (void)unused;
    for (int32_t slot = 0; slot < 2 * self->capacity; slot++) {
        if (self->taken[slot]) forget_ghost(self, slot);
    }
    return Py_NewRef(Py_None);
}

static void ghosts_dealloc(PyObject *object) {
    Ghosts *self = (Ghosts *)object;
    free_table(&self->table);
    PyMem_Free(self->hashes);
    PyMem_Free(self->taken);
    free_object(object);
}

static PyObject *ghosts_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Py_ssize_t capacity;
    (void)kwargs;
    if (parse_capacity(args, &capacity) < 0) return NULL;
    Ghosts *self = (Ghosts *)new_object(type);
    if (self == NULL) return NULL;
    self->capacity = capacity;
    self->hashes = PyMem_Calloc(2 * (size_t)capacity + 1, sizeof *self->hashes);
    self->taken = PyMem_Calloc(2 * (size_t)capacity + 1, sizeof *self->taken);
    if (make_table(&self->table, 2 * capacity) < 0 || self->hashes == NULL || self->taken == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static PyMethodDef ghosts_methods[] = {
    {"remember", ghosts_remember, METH_VARARGS, "remember(which, keys). They were evicted from list 0 or 1."},
    {"recall_into", ghosts_recall, METH_VARARGS,
     "recall_into(keys, out) -> number of keys that were known and now are not. Their list, else -1, goes to `out`."},
    {"sizes", ghosts_sizes, METH_NOARGS, "sizes() -> number of keys known of each list."},
    {"clear", ghosts_clear, METH_NOARGS, "clear()."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot ghosts_slots[] = {
    {Py_tp_new, ghosts_new}, {Py_tp_dealloc, ghosts_dealloc}, {Py_tp_methods, ghosts_methods}, {0, NULL},
};
static PyType_Spec ghosts_spec = {
    "kvtier._slots.Ghosts", sizeof(Ghosts), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, ghosts_slots,
};

/* -- Recency: slots in order of use ---------------------------------------------------------------------------------------- */

/* A ring of links; the one after the last slot stands between the newest and the oldest. newer[slot] == NONE: not in the ring. */
typedef struct {
    PyObject_HEAD
    Py_ssize_t capacity, length;
    int32_t *newer, *older;
} Recency;

static void unlink_slot(Recency *self, int32_t slot) {
    self->newer[self->older[slot]] = self->newer[slot];
    self->older[self->newer[slot]] = self->older[slot];
    self->newer[slot] = NONE;
    self->length--;
}

static void link_newest(Recency *self, int32_t slot) {
    int32_t end = (int32_t)self->capacity, newest = self->older[end];
    self->older[slot] = newest;
    self->newer[slot] = end;
    self->newer[newest] = slot;
    self->older[end] = slot;
    self->length++;
}

/* Borrow an array of slots that all lie in the list's range. */
static int borrow_slots(Recency *self, PyObject *array, Array *slots) {
    if (borrow(array, 8, 0, slots) < 0) return -1;
    if (check_slots(slots, self->capacity) == 0) return 0;
    give_back(slots);
    return -1;
}

static PyObject *recency_use(PyObject *object, PyObject *array) {
    Recency *self = (Recency *)object;
    Array slots;
    if (borrow_slots(self, array, &slots) < 0) return NULL;
    for (Py_ssize_t i = slots.count - 1; i >= 0; i--) {
        int32_t slot = (int32_t)get(&slots, i);
        if (self->newer[slot] != NONE) unlink_slot(self, slot);
        link_newest(self, slot);
    }
    give_back(&slots);
    return Py_NewRef(Py_None);
}

static PyObject *recency_drop(PyObject *object, PyObject *array) {
    Recency *self = (Recency *)object;
    Array slots;
    if (borrow_slots(self, array, &slots) < 0) return NULL;
    for (Py_ssize_t i = 0; i < slots.count; i++) {
        int32_t slot = (int32_t)get(&slots, i);
        if (self->newer[slot] != NONE) unlink_slot(self, slot);
    }
    give_back(&slots);
    return Py_NewRef(Py_None);
}

static Py_ssize_t take_allowed(Recency *self, Py_ssize_t count, const Array *allowed, const Array *out) {
    Py_ssize_t taken = 0;
    int32_t end = (int32_t)self->capacity, next;
    for (int32_t slot = self->newer[end]; slot != end && taken < count; slot = next) {
        next = self->newer[slot];
        if (!allowed->data[slot * allowed->stride]) continue;
        unlink_slot(self, slot);
        set(out, taken++, slot);
    }
    return taken;
}

static PyObject *recency_take(PyObject *object, PyObject *args) {
    Recency *self = (Recency *)object;
    PyObject *mask, *array;
    Py_ssize_t count, taken = -1;
    Array allowed, out;
    if (!PyArg_ParseTuple(args, "nOO", &count, &mask, &array) || borrow(mask, 1, 0, &allowed) < 0) return NULL;
    if (borrow(array, 8, 1, &out) == 0) {
        if (allowed.count < self->capacity || out.count < count) {
            PyErr_SetString(PyExc_ValueError, "expected to be told of every slot, and room for the slots to take");
        } else {
            taken = take_allowed(self, count, &allowed, &out);
        }
        give_back(&out);
    }
    give_back(&allowed);
    return taken < 0 ? NULL : PyLong_FromSsize_t(taken);
}

static PyObject *recency_holds(PyObject *object, PyObject *args) {
    Recency *self = (Recency *)object;
    PyObject *array, *mask;
    Array slots, out;
    if (!PyArg_ParseTuple(args, "OO", &array, &mask) || borrow_slots(self, array, &slots) < 0) return NULL;
    int status = borrow(mask, 1, 1, &out);
    if (status == 0 && out.count < slots.count) {
        PyErr_SetString(PyExc_ValueError, "expected room for an answer for each slot");
        status = -1;
        give_back(&out);
    }
    for (Py_ssize_t i = 0; status == 0 && i < slots.count; i++) out.data[i * out.stride] = self->newer[get(&slots, i)] != NONE;
    if (status == 0) give_back(&out);
    give_back(&slots);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *recency_slots_of(PyObject *object, PyObject *array) {
    Recency *self = (Recency *)object;
    Array out;
    Py_ssize_t done = 0;
    int32_t end = (int32_t)self->capacity;
    if (borrow(array, 8, 1, &out) < 0) return NULL;
    for (int32_t slot = self->newer[end]; slot != end && done < out.count; slot = self->newer[slot]) set(&out, done++, slot);
    give_back(&out);
    return PyLong_FromSsize_t(done);
}

static void make_empty(Recency *self) {
    for (Py_ssize_t slot = 0; slot < self->capacity; slot++) self->newer[slot] = NONE;
    self->newer[self->capacity] = self->older[self->capacity] = (int32_t)self->capacity;
    self->length = 0;
}

static PyObject *recency_clear(PyObject *self, PyObject *unused) {
    (void)unused;
    make_empty((Recency *)self);
    return Py_NewRef(Py_None);
}

static Py_ssize_t recency_length(PyObject *self) { return ((Recency *)self)->length; }

static void recency_dealloc(PyObject *object) {
    PyMem_Free(((Recency *)object)->newer);
    PyMem_Free(((Recency *)object)->older);
    free_object(object);
}

static PyObject *recency_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Py_ssize_t capacity;
    (void)kwargs;
    if (parse_capacity(args, &capacity) < 0) return NULL;
    Recency *self = (Recency *)new_object(type);
    if (self == NULL) return NULL;
    self->capacity = capacity;
    self->newer = PyMem_Malloc(((size_t)capacity + 1) * sizeof *self->newer);
    self->older = PyMem_Malloc(((size_t)capacity + 1) * sizeof *self->older);
    if (self->newer == NULL || self->older == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    make_empty(self);
    return (PyObject *)self;
}

static PyMethodDef recency_methods[] = {
    {"use", recency_use, METH_O, "use(slots). They become the newest, the first of them the newest of all."},
    {"drop", recency_drop, METH_O, "drop(slots)."},
    {"take_into", recency_take, METH_VARARGS, "take_into(count, allowed, out) -> number of slots taken out, oldest first."},
    {"holds_into", recency_holds, METH_VARARGS, "holds_into(slots, out). For each slot, whether it is in the list goes to `out`."},
    {"slots_into", recency_slots_of, METH_O, "slots_into(out) -> number of slots in the list. They go to `out`, oldest first."},
    {"clear", recency_clear, METH_NOARGS, "clear()."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot recency_slots[] = {
    {Py_tp_new, recency_new},       {Py_tp_dealloc, recency_dealloc}, {Py_tp_methods, recency_methods},
    {Py_mp_length, recency_length}, {0, NULL},
};
static PyType_Spec recency_spec = {
    "kvtier._slots.Recency", sizeof(Recency), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, recency_slots,
};

/* -- the module ---------------------------------------------------------------------------------------------------------- */

static int add_type(PyObject *module, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    int status = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return status;
}

/* Draw the secrets from Python's own, which are random unless PYTHONHASHSEED says otherwise. */
static int draw_secrets(void) {
    const char *names[2] = {"kvtier slots, one", "kvtier slots, two"};
    for (int i = 0; i < 2; i++) {
        PyObject *name = PyBytes_FromString(names[i]);
        if (name == NULL) return -1;
        secrets[i] = (uint64_t)PyObject_Hash(name);
        Py_DECREF(name);
    }
    return 0;
}

static int fill_module(PyObject *module) {
    if (draw_secrets() < 0) return -1;
    return add_type(module, &index_spec) < 0 || add_type(module, &ghosts_spec) < 0 || add_type(module, &recency_spec) < 0 ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill_module}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_slots", NULL, 0, NULL, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__slots(void) { return PyModuleDef_Init(&definition); }
