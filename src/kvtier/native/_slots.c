/* The classes of `kvtier.policies.slots` without a Python call for each chunk: which chunk is in which slot
 * (SlotBook), keys that were evicted (GhostLists), slots in order of use (RecencyList), and slots by class
 * with what is learnt of their reuse (ReuseLists). This module is optional: where it was not compiled, the
 * classes Python… of that module do the same. Their docstrings say what each method promises.
 * tests/unit/test_slots.py compares the two.
 *
 * The keys of a prompt are a thousand lookups in cold memory. They are looked up a few at a time, and the
 * memory that they need is prefetched, so that they wait for it together and not one after the other. A
 * decoded block is a single key, so the number of calls is what costs. Numbers go in and out as numpy
 * arrays, which are accessed as plain buffers.
 */
#define Py_LIMITED_API 0x030B0000 /* one binary for every Python from 3.11 on */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { AHEAD = 32, NONE = -1, WRITING = -1 };

/* -- numpy arrays as buffers ---------------------------------------------------------------------------- */

typedef struct {
    Py_buffer view;
    char *data;
    Py_ssize_t count, stride;
} Array;

/* Borrow a one-dimensional array with items of `size` bytes; -1 with an exception set if it is not one. */
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

static inline int64_t get(const Array *array, Py_ssize_t i) {
    return *(int64_t *)(array->data + i * array->stride);
}
static inline void set(const Array *array, Py_ssize_t i, int64_t value) {
    *(int64_t *)(array->data + i * array->stride) = value;
}
static inline char *flag(const Array *array, Py_ssize_t i) { return array->data + i * array->stride; }

/* Borrow an array of slots, all of them in `[first, limit)`. */
static int borrow_slots(PyObject *object, Py_ssize_t first, Py_ssize_t limit, Array *slots) {
    if (borrow(object, 8, 0, slots) < 0) return -1;
    for (Py_ssize_t i = 0; i < slots->count; i++) {
        if (get(slots, i) >= first && get(slots, i) < limit) continue;
        PyErr_Format(PyExc_IndexError, "expected slots from %zd to %zd, got %lld", first, limit - 1,
                     (long long)get(slots, i));
        give_back(slots);
        return -1;
    }
    return 0;
}

static PyObject *numpy_empty, *int64_type; /* set when the module is loaded */

/* Make an array for `count` slots and borrow it. */
static PyObject *new_slots(Py_ssize_t count, Array *array) {
    PyObject *length = PyLong_FromSsize_t(count), *object = NULL;
    if (length != NULL) object = PyObject_CallFunctionObjArgs(numpy_empty, length, int64_type, NULL);
    if (object != NULL && borrow(object, 8, 1, array) < 0) Py_CLEAR(object);
    Py_XDECREF(length);
    return object;
}

/* Give an array back and return its first `count` items. A negative `count` means that an exception is set:
 * return NULL. */
static PyObject *leading_part(PyObject *object, Array *array, Py_ssize_t count) {
    int whole = count == array->count;
    give_back(array);
    if (whole) return object;
    PyObject *part = count < 0 ? NULL : PySequence_GetSlice(object, 0, count);
    Py_DECREF(object);
    return part;
}

/* -- keys and their hashes ------------------------------------------------------------------------------ */

typedef struct {
    PyObject *object;
    const char *bytes;
    Py_ssize_t size;
} Key;

/* Read a key from an object, which may be NULL with an exception set; -1 with an exception set if it is no
 * key. */
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

/* Hash a key, 16 bytes at a time, with secrets, so that a client that can choose keys cannot make them
 * collide. */
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

/* -- a table from hashes to slots ----------------------------------------------------------------------- */

typedef struct {
    uint32_t tag; /* the upper half of a hash */
    int32_t slot; /* NONE: empty */
} Entry;

/* A table with open addressing and linear probing, at most half full. The tag gives an entry's home, so that
 * entries can move on deletion. */
typedef struct {
    uint32_t mask;
    Entry *entries;
} Table;

static inline uint32_t tag_of(uint64_t hash) { return (uint32_t)(hash >> 32); }
static inline Entry *home(const Table *table, uint32_t tag) { return table->entries + (tag & table->mask); }

static int make_table(Table *table, Py_ssize_t num_slots) {
    size_t size = 8;
    while (size < 2 * (size_t)num_slots) size *= 2;
    table->mask = (uint32_t)size - 1;
    table->entries = PyMem_Malloc(size * sizeof *table->entries);
    if (table->entries == NULL) return -1;
    memset(table->entries, 0xff, size * sizeof *table->entries);
    return 0;
}

static void put(Table *table, uint32_t tag, int32_t slot) {
    uint32_t i = tag & table->mask;
    while (table->entries[i].slot != NONE) i = (i + 1) & table->mask;
    table->entries[i] = (Entry){tag, slot};
}

/* Delete a slot from the table, where it has this tag. */
static void cut(Table *table, uint32_t tag, int32_t slot) {
    uint32_t mask = table->mask, hole = tag & mask;
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

/* Count the keys of a list; -1 with an exception set if the object is not a list. */
static Py_ssize_t count_keys(PyObject *list) {
    if (PyList_Check(list)) return PyList_Size(list);
    PyErr_SetString(PyExc_TypeError, "expected a list of keys");
    return -1;
}

/* Read and hash up to AHEAD keys of a list, beginning at `start`; return how many, or -1 with an
 * exception set. */
static Py_ssize_t hash_some(const Table *table, PyObject *list, Py_ssize_t start, Key *keys,
                            uint64_t *hashes) {
    Py_ssize_t count = count_keys(list) - start;
    if (count > AHEAD) count = AHEAD;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (read_key(PyList_GetItem(list, start + i), keys + i) < 0) return -1;
        hashes[i] = hash_key(keys + i);
        __builtin_prefetch(home(table, tag_of(hashes[i])));
    }
    return count;
}

/* -- a map from keys to slots --------------------------------------------------------------------------- */

typedef struct {
    Table table;
    Key *keys;      /* by slot, kept alive by the map's owner; a slot without a key has no object */
    uint32_t *tags; /* by slot */
    Py_ssize_t count;
} Map;

/* Keys that are being looked up, and their slots. */
typedef struct {
    Key keys[AHEAD];
    uint64_t hashes[AHEAD];
    int32_t slots[AHEAD];
} Some;

static int make_map(Map *map, Py_ssize_t num_slots) {
    map->count = 0;
    map->keys = PyMem_Calloc((size_t)num_slots + 1, sizeof *map->keys);
    map->tags = PyMem_Malloc(((size_t)num_slots + 1) * sizeof *map->tags);
    return make_table(&map->table, num_slots) < 0 || map->keys == NULL || map->tags == NULL ? -1 : 0;
}

static void free_map(Map *map) {
    PyMem_Free(map->table.entries);
    PyMem_Free(map->keys);
    PyMem_Free(map->tags);
}

static int32_t find_one(const Map *map, const Key *key, uint64_t hash) {
    const Entry *entries = map->table.entries;
    uint32_t tag = tag_of(hash);
    for (uint32_t i = tag & map->table.mask; entries[i].slot != NONE; i = (i + 1) & map->table.mask) {
        if (entries[i].tag == tag && same(map->keys + entries[i].slot, key)) return entries[i].slot;
    }
    return NONE;
}

/* Find up to AHEAD keys of a list, beginning at `start`; return how many were tried, or -1 with an
 * exception set. */
static Py_ssize_t find_some(const Map *map, PyObject *list, Py_ssize_t start, Some *some) {
    Py_ssize_t count = hash_some(&map->table, list, start, some->keys, some->hashes);
    for (Py_ssize_t i = 0; i < count; i++) {
        Entry entry = *home(&map->table, tag_of(some->hashes[i]));
        /* This guess is right most of the time. */
        some->slots[i] = entry.tag == tag_of(some->hashes[i]) ? entry.slot : NONE;
        if (some->slots[i] != NONE) __builtin_prefetch(map->keys + entry.slot);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (some->slots[i] != NONE) __builtin_prefetch(map->keys[some->slots[i]].bytes);
    }
    for (Py_ssize_t i = 0; i < count; i++) some->slots[i] = find_one(map, some->keys + i, some->hashes[i]);
    return count;
}

static void insert_one(Map *map, const Key *key, uint64_t hash, int32_t slot) {
    put(&map->table, tag_of(hash), slot);
    map->keys[slot] = *key;
    map->tags[slot] = tag_of(hash);
    map->count++;
}

/* Delete a slot that has a key, and return the key. */
static PyObject *delete_one(Map *map, int32_t slot) {
    PyObject *key = map->keys[slot].object;
    cut(&map->table, map->tags[slot], slot);
    map->keys[slot].object = NULL;
    map->count--;
    return key;
}

/* Prefetch the memory that deleting up to AHEAD slots will need. */
static void fetch_ahead(const Map *map, const Array *slots, Py_ssize_t start) {
    for (Py_ssize_t i = start; i < slots->count && i < start + AHEAD; i++) {
        int64_t slot = get(slots, i);
        if (map->keys[slot].object == NULL) continue;
        __builtin_prefetch(home(&map->table, map->tags[slot]), 1);
        __builtin_prefetch(map->keys[slot].object, 1);
    }
}

/* -- shared by the classes ------------------------------------------------------------------------------ */

/* Append to a list. If that fails, the list becomes NULL, with an exception set. A NULL list stays NULL. */
static inline void append(PyObject **list, PyObject *key) {
    if (*list != NULL && PyList_Append(*list, key) < 0) Py_CLEAR(*list);
}

/* Call a function with a borrowed array of slots, all of them in `[first, limit)`. */
typedef PyObject *OnSlots(void *self, const Array *slots);
static PyObject *with_slots(OnSlots *call, void *self, PyObject *array, Py_ssize_t first, Py_ssize_t limit) {
    Array slots;
    if (borrow_slots(array, first, limit, &slots) < 0) return NULL;
    PyObject *answer = call(self, &slots);
    give_back(&slots);
    return answer;
}

static PyObject *new_object(PyTypeObject *type) {
    return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

static void free_object(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* Read the first of two arguments, a number; -1 with an exception set if it is not one. */
static int read_pair(PyObject *const *args, Py_ssize_t num_args, Py_ssize_t *number) {
    if (num_args != 2) {
        PyErr_Format(PyExc_TypeError, "expected 2 arguments, got %zd", num_args);
        return -1;
    }
    *number = PyLong_AsSsize_t(args[0]);
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

static int check_capacity(Py_ssize_t capacity) {
    if (capacity >= 0 && capacity < INT32_MAX / 4) return 0;
    PyErr_Format(PyExc_ValueError, "expected a capacity of 0 to %d slots, got %zd", INT32_MAX / 4 - 1,
                 capacity);
    return -1;
}

/* -- SlotBook: which chunk is in which slot, and in what state ------------------------------------------ */

typedef struct {
    PyObject_HEAD
    Py_ssize_t num_slots, num_free;
    Map map;
    int32_t *free;                       /* a stack */
    char *is_free;                       /* by slot */
    Array readers, evictable, stored_by; /* by slot, in numpy's memory */
    uint32_t *marks, mark;               /* by slot, to find slots that are named twice */
} Book;

static PyObject *book_get(PyObject *self, PyObject *key) {
    Key query;
    if (read_key(key, &query) < 0) return NULL;
    int32_t slot = find_one(&((Book *)self)->map, &query, hash_key(&query));
    return slot == NONE ? Py_NewRef(Py_None) : PyLong_FromLong(slot);
}

static Py_ssize_t book_length(PyObject *self) { return ((Book *)self)->map.count; }

static PyObject *book_leading(PyObject *object, PyObject *keys) {
    Book *self = (Book *)object;
    Some some;
    Py_ssize_t ready = 0, tried;
    while ((tried = find_some(&self->map, keys, ready, &some)) > 0) {
        for (Py_ssize_t i = 0; i < tried; i++, ready++) {
            int32_t slot = some.slots[i];
            if (slot == NONE || get(&self->readers, slot) == WRITING) return PyLong_FromSsize_t(ready);
        }
    }
    return tried < 0 ? NULL : PyLong_FromSsize_t(ready);
}

/* Choose a new mark, which no slot has. */
static void new_mark(Book *self) {
    if (++self->mark != 0) return;
    memset(self->marks, 0, (size_t)self->num_slots * sizeof *self->marks);
    self->mark = 1;
}

/* Say whether a slot is not NONE and is seen for the first time under this mark. */
static int is_new(Book *self, int32_t slot) {
    if (slot == NONE || self->marks[slot] == self->mark) return 0;
    self->marks[slot] = self->mark;
    return 1;
}

static PyObject *find_all(Book *self, PyObject *keys, int only_new) {
    Array out;
    Some some;
    Py_ssize_t start = 0, done = 0, tried, count = count_keys(keys);
    PyObject *slots = count < 0 ? NULL : new_slots(count, &out);
    if (slots == NULL) return NULL;
    new_mark(self);
    for (; (tried = find_some(&self->map, keys, start, &some)) > 0; start += tried) {
        for (Py_ssize_t i = 0; i < tried; i++) {
            if (!only_new || is_new(self, some.slots[i])) set(&out, done++, some.slots[i]);
        }
    }
    return leading_part(slots, &out, tried < 0 ? -1 : done);
}

static PyObject *book_find(PyObject *self, PyObject *keys) { return find_all((Book *)self, keys, 0); }
static PyObject *book_held(PyObject *self, PyObject *keys) { return find_all((Book *)self, keys, 1); }

static PyObject *book_missing(PyObject *self, PyObject *keys) {
    Map missing; /* its slots are indices into the answer */
    Some some;
    Py_ssize_t start = 0, tried = 0, count = count_keys(keys);
    if (count < 0) return NULL;
    PyObject *list = make_map(&missing, count) < 0 ? PyErr_NoMemory() : PyList_New(0);
    for (; list != NULL && (tried = find_some(&((Book *)self)->map, keys, start, &some)) > 0;
         start += tried) {
        for (Py_ssize_t i = 0; i < tried; i++) {
            if (some.slots[i] != NONE || find_one(&missing, some.keys + i, some.hashes[i]) != NONE) continue;
            insert_one(&missing, some.keys + i, some.hashes[i], (int32_t)missing.count);
            append(&list, some.keys[i].object);
        }
    }
    free_map(&missing);
    if (tried < 0) Py_CLEAR(list);
    return list;
}

/* Free a slot that is empty. */
static void push_free(Book *self, int32_t slot) {
    set(&self->readers, slot, 0);
    self->is_free[slot] = 1;
    self->free[self->num_free++] = slot;
}

/* Take back the slots of the first `count` keys of a failed call, so that the call has changed nothing. */
static void take_back(Book *self, const Array *slots, Py_ssize_t count) {
    while (count-- > 0) {
        int32_t slot = (int32_t)get(slots, count);
        Py_DECREF(delete_one(&self->map, slot));
        push_free(self, slot);
    }
}

/* Give free slots to keys; return the number of keys, or -1 with an exception set and nothing changed. */
static Py_ssize_t reserve_all(Book *self, PyObject *keys, Py_ssize_t user, const Array *out) {
    Some some;
    Py_ssize_t done = 0, tried;
    while ((tried = find_some(&self->map, keys, done, &some)) > 0) {
        for (Py_ssize_t i = 0; i < tried; i++) {
            /* Look again: the key may be equal to an earlier key of this call. */
            if (find_one(&self->map, some.keys + i, some.hashes[i]) != NONE) {
                PyErr_SetString(PyExc_ValueError, "expected keys without a slot");
                take_back(self, out, done);
                return -1;
            }
            int32_t slot = self->free[--self->num_free];
            self->is_free[slot] = 0;
            Py_INCREF(some.keys[i].object);
            insert_one(&self->map, some.keys + i, some.hashes[i], slot);
            set(&self->readers, slot, WRITING);
            set(&self->stored_by, slot, user);
            set(out, done++, slot);
        }
    }
    if (tried >= 0) return done;
    take_back(self, out, done);
    return -1;
}

static PyObject *book_reserve(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    Book *self = (Book *)object;
    Array out;
    Py_ssize_t user, count;
    if (read_pair(args, num_args, &user) < 0 || (count = count_keys(args[1])) < 0) return NULL;
    if (count > self->num_free) {
        return PyErr_Format(PyExc_ValueError, "expected at most %zd keys, one for each free slot",
                            self->num_free);
    }
    PyObject *slots = new_slots(count, &out);
    return slots == NULL ? NULL : leading_part(slots, &out, reserve_all(self, args[1], user, &out));
}

static PyObject *book_complete(PyObject *object, PyObject *keys) {
    Book *self = (Book *)object;
    Some some;
    Py_ssize_t start = 0, tried = 0;
    PyObject *list = PyList_New(0);
    for (; list != NULL && (tried = find_some(&self->map, keys, start, &some)) > 0; start += tried) {
        for (Py_ssize_t i = 0; i < tried; i++) {
            int32_t slot = some.slots[i];
            if (slot == NONE || get(&self->readers, slot) != WRITING) continue;
            set(&self->readers, slot, 0);
            *flag(&self->evictable, slot) = 1;
            append(&list, self->map.keys[slot].object);
        }
    }
    if (tried < 0) Py_CLEAR(list);
    return list;
}

/* Add a reader to ready slots, or (`by` -1) take a reader from slots that have one. Stop at the first slot
 * where that is not possible, and return its index. */
static Py_ssize_t add_readers(Book *self, const Array *slots, Py_ssize_t count, int by) {
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t slot = get(slots, i), readers = slot == NONE ? WRITING : get(&self->readers, slot);
        if (readers == WRITING || readers + by < 0) return i;
        set(&self->readers, slot, readers + by);
        *flag(&self->evictable, slot) = readers + by == 0 && self->map.keys[slot].object != NULL;
    }
    return count;
}

static PyObject *change_readers(Book *self, const Array *slots, int by) {
    Py_ssize_t done = add_readers(self, slots, slots->count, by);
    if (done < slots->count) add_readers(self, slots, done, -by);
    return PyLong_FromSsize_t(done);
}

static PyObject *pin_all(void *self, const Array *slots) { return change_readers(self, slots, 1); }
static PyObject *unpin_all(void *self, const Array *slots) { return change_readers(self, slots, -1); }

static PyObject *keys_of_all(void *object, const Array *slots) {
    const Map *map = &((Book *)object)->map;
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; i < slots->count; i++) {
        if (i % AHEAD == 0) fetch_ahead(map, slots, i);
        PyObject *key = map->keys[get(slots, i)].object;
        if (key != NULL) append(&list, key);
    }
    return list;
}

/* Return the keys of slots, each once. */
static PyObject *list_keys(Book *self, const Array *slots) {
    PyObject *list = PyList_New(0);
    new_mark(self);
    for (Py_ssize_t i = 0; i < slots->count; i++) {
        if (i % AHEAD == 0) fetch_ahead(&self->map, slots, i);
        int32_t slot = (int32_t)get(slots, i);
        PyObject *key = self->map.keys[slot].object;
        if (key != NULL && is_new(self, slot)) append(&list, key);
    }
    return list;
}

/* Empty slots and return their keys. Only listing the keys can fail; it comes first, so that a failed call
 * has changed nothing. */
static PyObject *remove_all(void *object, const Array *slots) {
    Book *self = object;
    PyObject *list = list_keys(self, slots);
    for (Py_ssize_t i = 0; list != NULL && i < slots->count; i++) {
        int32_t slot = (int32_t)get(slots, i);
        *flag(&self->evictable, slot) = 0;
        if (self->map.keys[slot].object != NULL) Py_DECREF(delete_one(&self->map, slot));
    }
    return list;
}

static PyObject *free_all(void *object, const Array *slots) {
    Book *self = object;
    new_mark(self);
    for (Py_ssize_t i = 0; i < slots->count; i++) {
        int32_t slot = (int32_t)get(slots, i);
        if (self->map.keys[slot].object != NULL || self->is_free[slot] || !is_new(self, slot)) {
            return PyErr_Format(PyExc_ValueError,
                                "expected empty slots that are not free, each once, got %d", slot);
        }
    }
    for (Py_ssize_t i = 0; i < slots->count; i++) push_free(self, (int32_t)get(slots, i));
    return Py_NewRef(Py_None);
}

static PyObject *on_slots(PyObject *self, PyObject *array, Py_ssize_t first, OnSlots *call) {
    return with_slots(call, self, array, first, ((Book *)self)->num_slots);
}

static PyObject *book_pin(PyObject *self, PyObject *slots) { return on_slots(self, slots, NONE, pin_all); }
static PyObject *book_unpin(PyObject *self, PyObject *slots) {
    return on_slots(self, slots, NONE, unpin_all);
}
static PyObject *book_keys(PyObject *self, PyObject *slots) { return on_slots(self, slots, 0, keys_of_all); }
static PyObject *book_remove(PyObject *self, PyObject *slots) {
    return on_slots(self, slots, 0, remove_all);
}
static PyObject *book_free(PyObject *self, PyObject *slots) { return on_slots(self, slots, 0, free_all); }

/* Say whether all slots are held and evictable, each named once. Others can write the array of flags, so the
 * keys are checked too. */
static int are_evictable(Book *self, const Array *slots) {
    new_mark(self);
    for (Py_ssize_t i = 0; i < slots->count; i++) {
        int64_t slot = get(slots, i);
        if (slot < 0 || slot >= self->num_slots || !*flag(&self->evictable, slot)) return 0;
        if (self->map.keys[slot].object == NULL || !is_new(self, (int32_t)slot)) return 0;
    }
    return 1;
}

static PyObject *book_release(PyObject *object, PyObject *array) {
    Book *self = (Book *)object;
    Array slots;
    if (borrow(array, 8, 0, &slots) < 0) return NULL;
    PyObject *keys = are_evictable(self, &slots) ? remove_all(self, &slots) : Py_NewRef(Py_None);
    int removed = keys != NULL && keys != Py_None;
    for (Py_ssize_t i = 0; removed && i < slots.count; i++) push_free(self, (int32_t)get(&slots, i));
    give_back(&slots);
    return keys;
}

static PyObject *book_num_free(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromSsize_t(((Book *)self)->num_free);
}

static PyObject *book_free_slots(PyObject *object, PyObject *unused) {
    Book *self = (Book *)object;
    Array out;
    (void)unused;
    PyObject *slots = new_slots(self->num_free, &out);
    for (Py_ssize_t i = 0; slots != NULL && i < self->num_free; i++) set(&out, i, self->free[i]);
    return slots == NULL ? NULL : leading_part(slots, &out, self->num_free);
}

static void book_dealloc(PyObject *object) {
    Book *self = (Book *)object;
    for (Py_ssize_t slot = 0; self->map.keys != NULL && slot < self->num_slots; slot++)
        Py_XDECREF(self->map.keys[slot].object);
    free_map(&self->map);
    PyMem_Free(self->free);
    PyMem_Free(self->is_free);
    PyMem_Free(self->marks);
    give_back(&self->readers);
    give_back(&self->evictable);
    give_back(&self->stored_by);
    free_object(object);
}

/* Make the book of the borrowed arrays: all slots are free but those in `empty`, which have no key. */
static int make_book(Book *self, Array *empty) {
    Py_ssize_t num_slots = self->readers.count;
    if (check_capacity(num_slots) < 0) return -1;
    if (self->evictable.count != num_slots || self->stored_by.count != num_slots) {
        PyErr_SetString(PyExc_ValueError, "expected arrays of one length");
        return -1;
    }
    self->num_slots = self->num_free = num_slots;
    self->free = PyMem_Malloc(((size_t)num_slots + 1) * sizeof *self->free);
    self->is_free = PyMem_Malloc((size_t)num_slots + 1);
    self->marks = PyMem_Calloc((size_t)num_slots + 1, sizeof *self->marks);
    if (make_map(&self->map, num_slots) < 0 || self->free == NULL || self->is_free == NULL ||
        self->marks == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memset(self->is_free, 1, (size_t)num_slots);
    for (Py_ssize_t i = 0; i < empty->count; i++) {
        int64_t slot = get(empty, i);
        if (slot < 0 || slot >= num_slots) {
            PyErr_SetString(PyExc_ValueError, "expected slots of this book");
            return -1;
        }
        self->is_free[slot] = 0;
    }
    self->num_free = 0;
    for (Py_ssize_t slot = num_slots - 1; slot >= 0; slot--)
        if (self->is_free[slot]) self->free[self->num_free++] = (int32_t)slot;
    return 0;
}

static PyObject *book_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *readers, *evictable, *stored_by, *no_key = NULL;
    Array empty = {0};
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OOO|O", &readers, &evictable, &stored_by, &no_key)) return NULL;
    if (no_key != NULL && borrow(no_key, 8, 0, &empty) < 0) return NULL;
    Book *self = (Book *)new_object(type);
    if (self != NULL &&
        (borrow(readers, 8, 1, &self->readers) < 0 || borrow(evictable, 1, 1, &self->evictable) < 0 ||
         borrow(stored_by, 8, 1, &self->stored_by) < 0 || make_book(self, &empty) < 0)) {
        Py_DECREF(self);
        self = NULL;
    }
    if (no_key != NULL) give_back(&empty);
    return (PyObject *)self;
}

static PyMethodDef book_methods[] = {
    {"get", book_get, METH_O, NULL},
    {"leading", book_leading, METH_O, NULL},
    {"find", book_find, METH_O, NULL},
    {"held", book_held, METH_O, NULL},
    {"missing", book_missing, METH_O, NULL},
    {"reserve", (PyCFunction)(void (*)(void))book_reserve, METH_FASTCALL, NULL},
    {"complete", book_complete, METH_O, NULL},
    {"pin", book_pin, METH_O, NULL},
    {"unpin", book_unpin, METH_O, NULL},
    {"keys", book_keys, METH_O, NULL},
    {"release", book_release, METH_O, NULL},
    {"remove", book_remove, METH_O, NULL},
    {"free", book_free, METH_O, NULL},
    {"num_free", book_num_free, METH_NOARGS, NULL},
    {"free_slots", book_free_slots, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot book_slots[] = {
    {Py_tp_new, book_new},       {Py_tp_dealloc, book_dealloc},   {Py_tp_methods, book_methods},
    {Py_mp_length, book_length}, {0, NULL},
};
static PyType_Spec book_spec = {"kvtier.native._slots.SlotBook", sizeof(Book), 0, Py_TPFLAGS_DEFAULT,
                                book_slots};

/* -- GhostLists: keys that were evicted from one list or two -------------------------------------------- */

/* A ring of hashes for each list; a slot is a position in one of the rings. Keys are told apart by 64 bits
 * of a secret hash. No key has to be kept alive, and a collision, one in 2^64, costs a policy one bad
 * guess. */
typedef struct {
    PyObject_HEAD
    Py_ssize_t capacity, num_lists, next[2], sizes[2];
    Table table;
    uint64_t *hashes; /* by slot; 0: no key */
} Ghosts;

static int32_t find_ghost(const Ghosts *self, uint64_t hash) {
    const Entry *entries = self->table.entries;
    for (uint32_t i = tag_of(hash) & self->table.mask; entries[i].slot != NONE;
         i = (i + 1) & self->table.mask) {
        if (entries[i].tag == tag_of(hash) && self->hashes[entries[i].slot] == hash) return entries[i].slot;
    }
    return NONE;
}

static void forget_ghost(Ghosts *self, int32_t slot) {
    cut(&self->table, tag_of(self->hashes[slot]), slot);
    self->hashes[slot] = 0;
    self->sizes[slot >= self->capacity]--;
}

/* Add a key to a list that has room for one at least, and return its slot. */
static int32_t add_ghost(Ghosts *self, Py_ssize_t which, uint64_t hash) {
    int32_t slot = (int32_t)(which * self->capacity + self->next[which]), known = find_ghost(self, hash);
    if (known != NONE) forget_ghost(self, known);
    if (self->hashes[slot] != 0) forget_ghost(self, slot);
    put(&self->table, tag_of(hash), slot);
    self->hashes[slot] = hash;
    self->sizes[which]++;
    if (++self->next[which] == self->capacity) self->next[which] = 0;
    return slot;
}

/* Prefetch the memory needed to forget the ghosts that `count` new ones overwrite. */
static void fetch_oldest(const Ghosts *self, Py_ssize_t which, Py_ssize_t count) {
    const uint64_t *ring = self->hashes + which * self->capacity;
    for (Py_ssize_t i = self->next[which]; i < self->capacity && count-- > 0; i++) {
        __builtin_prefetch(home(&self->table, tag_of(ring[i])), 1);
    }
}

/* Make an answer in which no key is known yet. */
static PyObject *new_answer(Py_ssize_t count, Array *out) {
    PyObject *slots = new_slots(count, out);
    for (Py_ssize_t i = 0; slots != NULL && i < count; i++) set(out, i, NONE);
    return slots;
}

static PyObject *ghosts_remember(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    Ghosts *self = (Ghosts *)object;
    Array out;
    Some some;
    Py_ssize_t start = 0, count, which;
    if (read_pair(args, num_args, &which) < 0 || (count = count_keys(args[1])) < 0) return NULL;
    if (which < 0 || which >= self->num_lists)
        return PyErr_Format(PyExc_ValueError, "expected one of %zd lists, got %zd", self->num_lists, which);
    PyObject *slots = new_answer(count, &out);
    if (slots == NULL) return NULL;
    for (; (count = hash_some(&self->table, args[1], start, some.keys, some.hashes)) > 0; start += count) {
        fetch_oldest(self, which, count);
        for (Py_ssize_t i = 0; i < count && self->capacity > 0; i++) {
            set(&out, start + i, add_ghost(self, which, some.hashes[i]));
        }
    }
    return leading_part(slots, &out, count < 0 ? -1 : start);
}

/* Return the slot of each key, and forget the keys if they are `taken`; None if all keys are unknown. */
static PyObject *find_ghosts(Ghosts *self, PyObject *keys, int taken) {
    PyObject *slots = NULL; /* made at the first known key; most often there is none */
    Array out;
    Some some;
    Py_ssize_t start = 0, count;
    for (; (count = hash_some(&self->table, keys, start, some.keys, some.hashes)) > 0; start += count) {
        for (Py_ssize_t i = 0; i < count; i++) {
            int32_t slot = find_ghost(self, some.hashes[i]);
            if (slot == NONE) continue;
            if (slots == NULL && (slots = new_answer(PyList_Size(keys), &out)) == NULL) return NULL;
            set(&out, start + i, slot);
            if (taken) forget_ghost(self, slot);
        }
    }
    if (slots != NULL) return leading_part(slots, &out, count < 0 ? -1 : start);
    return count < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *ghosts_find(PyObject *self, PyObject *keys) {
    return find_ghosts((Ghosts *)self, keys, 0);
}

static PyObject *ghosts_recall(PyObject *self, PyObject *keys) {
    return find_ghosts((Ghosts *)self, keys, 1);
}

static PyObject *ghosts_sizes(PyObject *object, PyObject *unused) {
    (void)unused;
    return Py_BuildValue("(nn)", ((Ghosts *)object)->sizes[0], ((Ghosts *)object)->sizes[1]);
}

static int make_ghosts(Ghosts *self, Py_ssize_t capacity, Py_ssize_t num_lists) {
    self->capacity = capacity;
    self->num_lists = num_lists;
    self->hashes = PyMem_Calloc((size_t)(num_lists * capacity) + 1, sizeof *self->hashes);
    return make_table(&self->table, num_lists * capacity) < 0 || self->hashes == NULL ? -1 : 0;
}

static void free_ghosts(Ghosts *self) {
    PyMem_Free(self->table.entries);
    PyMem_Free(self->hashes);
}

static void ghosts_dealloc(PyObject *object) {
    free_ghosts((Ghosts *)object);
    free_object(object);
}

static PyObject *ghosts_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Py_ssize_t capacity, num_lists;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "nn", &capacity, &num_lists) || check_capacity(capacity) < 0) return NULL;
    if (num_lists < 1 || num_lists > 2)
        return PyErr_Format(PyExc_ValueError, "expected 1 or 2 lists, got %zd", num_lists);
    Ghosts *self = (Ghosts *)new_object(type);
    if (self == NULL) return NULL;
    if (make_ghosts(self, capacity, num_lists) < 0) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static PyMethodDef ghosts_methods[] = {
    {"remember", (PyCFunction)(void (*)(void))ghosts_remember, METH_FASTCALL, NULL},
    {"find", ghosts_find, METH_O, NULL},
    {"recall", ghosts_recall, METH_O, NULL},
    {"sizes", ghosts_sizes, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot ghosts_slots[] = {
    {Py_tp_new, ghosts_new}, {Py_tp_dealloc, ghosts_dealloc}, {Py_tp_methods, ghosts_methods}, {0, NULL},
};
static PyType_Spec ghosts_spec = {"kvtier.native._slots.GhostLists", sizeof(Ghosts), 0, Py_TPFLAGS_DEFAULT,
                                  ghosts_slots};

/* -- RecencyList: slots in order of use ----------------------------------------------------------------- */

/* A ring of links. The link with index `capacity` stands between the newest and the oldest slot. newer[slot]
 * == NONE: the slot is not in the ring. */
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

static inline int holds(const Recency *self, int64_t slot) { return self->newer[slot] != NONE; }

static PyObject *use_all(void *object, const Array *slots) {
    Recency *self = object;
    for (Py_ssize_t i = slots->count - 1; i >= 0; i--) {
        int32_t slot = (int32_t)get(slots, i);
        if (holds(self, slot)) unlink_slot(self, slot);
        link_newest(self, slot);
    }
    return Py_NewRef(Py_None);
}

static PyObject *renew_all(void *object, const Array *slots) {
    Recency *self = object;
    Array others;
    Py_ssize_t done = 0;
    PyObject *list = new_slots(slots->count, &others);
    if (list == NULL) return NULL;
    for (Py_ssize_t i = 0; i < slots->count; i++) {
        if (!holds(self, get(slots, i))) set(&others, done++, get(slots, i));
    }
    for (Py_ssize_t i = slots->count - 1; i >= 0; i--) {
        int32_t slot = (int32_t)get(slots, i);
        if (!holds(self, slot)) continue;
        unlink_slot(self, slot);
        link_newest(self, slot);
    }
    return leading_part(list, &others, done);
}

static PyObject *drop_all(void *object, const Array *slots) {
    for (Py_ssize_t i = 0; i < slots->count; i++) {
        if (holds(object, get(slots, i))) unlink_slot(object, (int32_t)get(slots, i));
    }
    return Py_NewRef(Py_None);
}

static PyObject *on_ranked(PyObject *self, PyObject *array, OnSlots *call) {
    return with_slots(call, self, array, 0, ((Recency *)self)->capacity);
}

static PyObject *recency_use(PyObject *self, PyObject *slots) { return on_ranked(self, slots, use_all); }
static PyObject *recency_renew(PyObject *self, PyObject *slots) { return on_ranked(self, slots, renew_all); }
static PyObject *recency_drop(PyObject *self, PyObject *slots) { return on_ranked(self, slots, drop_all); }

/* Write the least recent allowed slots to `out`, and unlink them if they are `taken`. */
static Py_ssize_t list_allowed(Recency *self, Py_ssize_t count, const Array *allowed, const Array *out,
                               int taken) {
    Py_ssize_t done = 0;
    int32_t end = (int32_t)self->capacity, next;
    for (int32_t slot = self->newer[end]; slot != end && done < count; slot = next) {
        next = self->newer[slot];
        if (!*flag(allowed, slot)) continue;
        if (taken) unlink_slot(self, slot);
        set(out, done++, slot);
    }
    return done;
}

static PyObject *least_recent(PyObject *object, PyObject *const *args, Py_ssize_t num_args, int taken) {
    Recency *self = (Recency *)object;
    PyObject *slots = NULL;
    Py_ssize_t count;
    Array allowed, out;
    if (read_pair(args, num_args, &count) < 0 || borrow(args[1], 1, 0, &allowed) < 0) return NULL;
    if (count > self->length) count = self->length;
    if (allowed.count < self->capacity) {
        PyErr_SetString(PyExc_ValueError, "expected to be told of every slot");
    } else if ((slots = new_slots(count < 0 ? 0 : count, &out)) != NULL) {
        slots = leading_part(slots, &out, list_allowed(self, count, &allowed, &out, taken));
    }
    give_back(&allowed);
    return slots;
}

static PyObject *recency_take(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    return least_recent(self, args, num_args, 1);
}

static PyObject *recency_coldest(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    return least_recent(self, args, num_args, 0);
}

static PyObject *recency_slots_of(PyObject *object, PyObject *unused) {
    Recency *self = (Recency *)object;
    Array out;
    Py_ssize_t done = 0;
    int32_t end = (int32_t)self->capacity;
    (void)unused;
    PyObject *slots = new_slots(self->length, &out);
    if (slots == NULL) return NULL;
    for (int32_t slot = self->newer[end]; slot != end; slot = self->newer[slot]) set(&out, done++, slot);
    return leading_part(slots, &out, done);
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
    if (!PyArg_ParseTuple(args, "n", &capacity) || check_capacity(capacity) < 0) return NULL;
    Recency *self = (Recency *)new_object(type);
    if (self == NULL) return NULL;
    self->capacity = capacity;
    self->newer = PyMem_Malloc(((size_t)capacity + 1) * sizeof *self->newer);
    self->older = PyMem_Malloc(((size_t)capacity + 1) * sizeof *self->older);
    if (self->newer == NULL || self->older == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t slot = 0; slot < capacity; slot++) self->newer[slot] = NONE;
    self->newer[capacity] = self->older[capacity] = (int32_t)capacity;
    return (PyObject *)self;
}

static PyMethodDef recency_methods[] = {
    {"use", recency_use, METH_O, NULL},
    {"renew", recency_renew, METH_O, NULL},
    {"drop", recency_drop, METH_O, NULL},
    {"take", (PyCFunction)(void (*)(void))recency_take, METH_FASTCALL, NULL},
    {"coldest", (PyCFunction)(void (*)(void))recency_coldest, METH_FASTCALL, NULL},
    {"slots", recency_slots_of, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot recency_slots[] = {
    {Py_tp_new, recency_new},       {Py_tp_dealloc, recency_dealloc}, {Py_tp_methods, recency_methods},
    {Py_mp_length, recency_length}, {0, NULL},
};
static PyType_Spec recency_spec = {"kvtier.native._slots.RecencyList", sizeof(Recency), 0,
                                   Py_TPFLAGS_DEFAULT, recency_slots};

/* -- ReuseLists: chunks by class, those that left, and the times that they were idle -------------------- */

enum { MOST_BINS = 64 };

/* What is known of a chunk. numpy has the array; `CHUNK` in kvtier.policies.slots describes it. */
typedef struct {
    double stamp;
    uint8_t uses, class, is_idle;
} Chunk;

/* A ring of links for each class, as in RecencyList: the link of class c has the index `capacity + c`. */
typedef struct {
    PyObject_HEAD
    Py_ssize_t capacity, num_classes, num_bins, num_endings, length, every;
    int32_t *newer, *older;
    uint64_t *hashes;                    /* of the keys, by slot */
    Ghosts ghosts;
    Array chunks, gone;                  /* of Chunk: by slot, and by position among the ghosts */
    Array used, given_up, indices;       /* of double, by class and bin */
    Array ages, lean;                    /* of double, by bin */
} Reuse;

static inline double *number_at(const Array *array, Py_ssize_t i) {
    return (double *)(array->data + i * array->stride);
}
static inline double number(const Array *array, Py_ssize_t i) { return *number_at(array, i); }
static inline Chunk *chunk_at(const Array *array, Py_ssize_t i) {
    return (Chunk *)(array->data + i * array->stride);
}

static void unlink_classed(Reuse *self, int32_t slot) {
    self->newer[self->older[slot]] = self->newer[slot];
    self->older[self->newer[slot]] = self->older[slot];
    self->newer[slot] = NONE;
    self->length--;
}

/* Make a slot the most recent of its chunk's class. */
static void link_classed(Reuse *self, int32_t slot) {
    int32_t end = (int32_t)(self->capacity + chunk_at(&self->chunks, slot)->class);
    if (self->newer[slot] != NONE) unlink_classed(self, slot);
    int32_t newest = self->older[end];
    self->older[slot] = newest;
    self->newer[slot] = end;
    self->newer[newest] = slot;
    self->older[end] = slot;
    self->length++;
}

/* Return the last bin whose youngest age is not above this age. */
static Py_ssize_t bin_of(const Reuse *self, double age) {
    Py_ssize_t low = 0, high = self->num_bins - 1;
    while (low < high) {
        Py_ssize_t middle = (low + high + 1) / 2;
        if (number(&self->ages, middle) <= age) low = middle;
        else high = middle - 1;
    }
    return low;
}

/* Count an idle time that ends now, of a chunk with this number, in a table by class and bin. */
static void count_idle(const Reuse *self, const Array *counts, const Chunk *chunk, Py_ssize_t number,
                       double now) {
    if (!chunk->is_idle || number % self->every != 0) return;
    ++*number_at(counts, chunk->class * self->num_bins + bin_of(self, now - chunk->stamp));
}

static inline uint8_t one_more(uint8_t uses) { return uses == 255 ? uses : (uint8_t)(uses + 1); }

/* Return the class of chunks with so many uses: 1, 2, 3 to 4, 5 to 8, and so on. */
static uint8_t class_of(const Reuse *self, uint8_t uses, Py_ssize_t ending) {
    Py_ssize_t by_uses = 0, most = self->num_classes / self->num_endings - 1;
    while (by_uses < most && uses > 1 << by_uses) by_uses++;
    return (uint8_t)(by_uses * self->num_endings + ending);
}

static void use_chunk(Reuse *self, int32_t slot, int is_reused, double now, Py_ssize_t ending) {
    Chunk *chunk = chunk_at(&self->chunks, slot);
    if (is_reused && chunk->is_idle) {
        count_idle(self, &self->used, chunk, slot, now);
        chunk->uses = one_more(chunk->uses);
    }
    chunk->stamp = now;
    chunk->is_idle = ending < self->num_endings - 1;
    chunk->class = class_of(self, chunk->uses, ending);
    link_classed(self, slot);
}

static PyObject *reuse_use(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    Reuse *self = (Reuse *)object;
    Array slots, reused;
    if (num_args != 4) return PyErr_Format(PyExc_TypeError, "expected 4 arguments, got %zd", num_args);
    double now = PyFloat_AsDouble(args[2]);
    Py_ssize_t ending = PyLong_AsSsize_t(args[3]);
    if (PyErr_Occurred()) return NULL;
    if (ending < 0 || ending >= self->num_endings)
        return PyErr_Format(PyExc_ValueError, "expected one of %zd endings, got %zd", self->num_endings,
                            ending);
    if (borrow_slots(args[0], 0, self->capacity, &slots) < 0) return NULL;
    if (borrow(args[1], 1, 0, &reused) < 0) {
        give_back(&slots);
        return NULL;
    }
    int fits = reused.count == slots.count;
    for (Py_ssize_t i = slots.count - 1; fits && i >= 0; i--) {
        use_chunk(self, (int32_t)get(&slots, i), *flag(&reused, i), now, ending);
    }
    give_back(&slots);
    give_back(&reused);
    if (fits) return Py_NewRef(Py_None);
    return PyErr_Format(PyExc_ValueError, "expected a flag for each slot");
}

/* Forget a chunk that comes back, and count that. Return its uses, with this one. */
static uint8_t recall_one(Reuse *self, uint64_t hash, double now) {
    int32_t position = find_ghost(&self->ghosts, hash);
    if (position == NONE) return 1;
    Chunk *gone = chunk_at(&self->gone, position);
    forget_ghost(&self->ghosts, position);
    count_idle(self, &self->used, gone, position, now);
    gone->is_idle = 0;
    return one_more(gone->uses);
}

/* Remember a chunk that is not held any more, in the place of the oldest such chunk. */
static void remember_one(Reuse *self, uint64_t hash, Chunk chunk, double now) {
    int32_t known = find_ghost(&self->ghosts, hash);
    if (self->ghosts.capacity == 0) return;
    if (known != NONE) chunk_at(&self->gone, known)->is_idle = 0;
    int32_t position = add_ghost(&self->ghosts, 0, hash);
    Chunk *oldest = chunk_at(&self->gone, position);
    count_idle(self, &self->given_up, oldest, position, now);
    *oldest = chunk;
}

static void insert_chunk(Reuse *self, int32_t slot, uint64_t hash, double now) {
    uint8_t uses = recall_one(self, hash, now);
    self->hashes[slot] = hash;
    *chunk_at(&self->chunks, slot) = (Chunk){now, uses, class_of(self, uses, self->num_endings - 1), 0};
}

static PyObject *reuse_insert(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    Reuse *self = (Reuse *)object;
    Array slots;
    Some some;
    Py_ssize_t count, start = 0;
    if (num_args != 3) return PyErr_Format(PyExc_TypeError, "expected 3 arguments, got %zd", num_args);
    double now = PyFloat_AsDouble(args[2]);
    Py_ssize_t total = count_keys(args[1]);
    if (PyErr_Occurred() || borrow_slots(args[0], 0, self->capacity, &slots) < 0) return NULL;
    if (slots.count != total) {
        give_back(&slots);
        return PyErr_Format(PyExc_ValueError, "expected a key for each slot");
    }
    for (; (count = hash_some(&self->ghosts.table, args[1], start, some.keys, some.hashes)) > 0;
         start += count) {
        for (Py_ssize_t i = 0; i < count; i++) {
            insert_chunk(self, (int32_t)get(&slots, start + i), some.hashes[i], now);
        }
    }
    for (Py_ssize_t i = total - 1; count == 0 && i >= 0; i--) link_classed(self, (int32_t)get(&slots, i));
    give_back(&slots);
    return count < 0 ? NULL : Py_NewRef(Py_None);
}

/* Remember the keys of a list from `start` on as chunks that are not stored; -1 with an exception set. */
static int refuse_from(Reuse *self, PyObject *keys, Py_ssize_t start, double now) {
    Some some;
    Py_ssize_t count;
    for (; (count = hash_some(&self->ghosts.table, keys, start, some.keys, some.hashes)) > 0;
         start += count) {
        for (Py_ssize_t i = 0; i < count; i++) {
            uint8_t uses = recall_one(self, some.hashes[i], now);
            Chunk chunk = {now, uses, class_of(self, uses, self->num_endings - 1), 1};
            remember_one(self, some.hashes[i], chunk, now);
        }
    }
    return (int)count;
}

static PyObject *reuse_refuse(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 2) return PyErr_Format(PyExc_TypeError, "expected 2 arguments, got %zd", num_args);
    double now = PyFloat_AsDouble(args[1]);
    if (PyErr_Occurred() || count_keys(args[0]) < 0) return NULL;
    return refuse_from((Reuse *)self, args[0], 0, now) < 0 ? NULL : Py_NewRef(Py_None);
}

/* Unlink slots and remember their chunks. */
static void leave_all(Reuse *self, const Array *slots, Py_ssize_t count, double now) {
    fetch_oldest(&self->ghosts, 0, count);
    for (Py_ssize_t i = 0; i < count; i++) {
        int32_t slot = (int32_t)get(slots, i);
        if (self->newer[slot] == NONE) continue;
        unlink_classed(self, slot);
        remember_one(self, self->hashes[slot], *chunk_at(&self->chunks, slot), now);
        chunk_at(&self->chunks, slot)->is_idle = 0;
    }
}

static PyObject *reuse_leave(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    Reuse *self = (Reuse *)object;
    Array slots;
    if (num_args != 2) return PyErr_Format(PyExc_TypeError, "expected 2 arguments, got %zd", num_args);
    double now = PyFloat_AsDouble(args[1]);
    if (PyErr_Occurred() || borrow_slots(args[0], 0, self->capacity, &slots) < 0) return NULL;
    leave_all(self, &slots, slots.count, now);
    give_back(&slots);
    return Py_NewRef(Py_None);
}

static PyObject *reuse_remove(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    Reuse *self = (Reuse *)object;
    Array slots;
    if (num_args != 2) return PyErr_Format(PyExc_TypeError, "expected 2 arguments, got %zd", num_args);
    double now = PyFloat_AsDouble(args[1]);
    if (PyErr_Occurred() || borrow_slots(args[0], 0, self->capacity, &slots) < 0) return NULL;
    for (Py_ssize_t i = 0; i < slots.count; i++) {
        int32_t slot = (int32_t)get(&slots, i);
        Chunk *chunk = chunk_at(&self->chunks, slot);
        count_idle(self, &self->given_up, chunk, slot, now);
        chunk->is_idle = 0;
        if (self->newer[slot] != NONE) unlink_classed(self, slot);
    }
    give_back(&slots);
    return Py_NewRef(Py_None);
}

/* -- which chunks leave */

/* Return the index of a chunk at its age: between those of the beginnings of two bins. With `lean`, each of
 * the two is multiplied by that of its bin. */
static double index_of(const Reuse *self, const Chunk *chunk, double now, const Array *lean) {
    double age = now - chunk->stamp;
    Py_ssize_t bin = bin_of(self, age), at = chunk->class * self->num_bins + bin;
    double begin = number(&self->ages, bin), index = number(&self->indices, at);
    if (lean != NULL) index *= number(lean, bin);
    if (age <= begin) return index;
    if (bin + 1 == self->num_bins) return begin > 0 ? index * begin / age : index;
    double part = (age - begin) / (number(&self->ages, bin + 1) - begin);
    double next = number(&self->indices, at + 1);
    if (lean != NULL) next *= number(lean, bin + 1);
    return index + part * (next - index);
}

/* The oldest slot of a class that may be listed next, its stamp, and its index. */
typedef struct {
    int32_t slot; /* the link of the class if no slot is left */
    int32_t class;
    double stamp, index;
} Oldest;

/* Go on to the next allowed slot of a class, beginning with this one; return whether there is one. */
static int find_oldest(const Reuse *self, const Array *allowed, double now, int32_t slot, Oldest *oldest) {
    int32_t end = (int32_t)self->capacity + oldest->class;
    while (slot != end && !*flag(allowed, slot)) slot = self->newer[slot];
    if (slot == end) return 0;
    oldest->slot = slot;
    oldest->stamp = chunk_at(&self->chunks, slot)->stamp;
    oldest->index = index_of(self, chunk_at(&self->chunks, slot), now, &self->lean);
    return 1;
}

static inline int leaves_before(const Oldest *one, const Oldest *other) {
    if (one->index != other->index) return one->index < other->index;
    if (one->stamp != other->stamp) return one->stamp < other->stamp;
    return one->class < other->class;
}

/* List the slots in the order in which they leave. The classes with slots are in a heap; that of which a
 * slot leaves next is at its root. */
static Py_ssize_t list_in_order(const Reuse *self, const Array *allowed, double now, const Array *out) {
    Oldest heap[256], one;
    Py_ssize_t size = 0, done = 0, at;
    for (one.class = 0; one.class < self->num_classes; one.class++) {
        if (!find_oldest(self, allowed, now, self->newer[self->capacity + one.class], &one)) continue;
        for (at = size++; at > 0 && leaves_before(&one, heap + (at - 1) / 2); at = (at - 1) / 2) {
            heap[at] = heap[(at - 1) / 2];
        }
        heap[at] = one;
    }
    while (done < out->count && size > 0) {
        one = heap[0];
        set(out, done++, one.slot);
        if (!find_oldest(self, allowed, now, self->newer[one.slot], &one)) one = heap[--size];
        at = 0;
        for (Py_ssize_t next; (next = 2 * at + 1) < size; at = next) {
            if (next + 1 < size && leaves_before(heap + next + 1, heap + next)) next++;
            if (!leaves_before(heap + next, &one)) break;
            heap[at] = heap[next];
        }
        heap[at] = one;
    }
    return done;
}

/* List up to `count` slots, those that leave first, at the beginning of a new array that is borrowed as
 * `out`. NULL with an exception set. */
static PyObject *order_some(const Reuse *self, Py_ssize_t count, PyObject *flags, double now, Array *out,
                            Py_ssize_t *listed) {
    PyObject *slots = NULL;
    Array allowed;
    if (borrow(flags, 1, 0, &allowed) < 0) return NULL;
    if (count > self->length) count = self->length;
    if (allowed.count < self->capacity) {
        PyErr_SetString(PyExc_ValueError, "expected a flag for each slot");
    } else if ((slots = new_slots(count < 0 ? 0 : count, out)) != NULL) {
        *listed = list_in_order(self, &allowed, now, out);
    }
    give_back(&allowed);
    return slots;
}

static PyObject *reuse_order(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    Array out;
    Py_ssize_t listed;
    if (num_args != 3) return PyErr_Format(PyExc_TypeError, "expected 3 arguments, got %zd", num_args);
    Py_ssize_t count = PyLong_AsSsize_t(args[0]);
    double now = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred()) return NULL;
    PyObject *slots = order_some((Reuse *)object, count, args[1], now, &out, &listed);
    return slots == NULL ? NULL : leading_part(slots, &out, listed);
}

/* Return the index of a chunk that a request begins to use; -1 with an exception set. */
static double offered_index(const Reuse *self, PyObject *object) {
    Key key;
    if (read_key(object, &key) < 0) return -1;
    int32_t position = find_ghost(&self->ghosts, hash_key(&key));
    uint8_t uses = position == NONE ? 1 : one_more(chunk_at(&self->gone, position)->uses);
    return number(&self->indices, class_of(self, uses, self->num_endings - 1) * self->num_bins);
}

static PyObject *reuse_offered(PyObject *object, PyObject *keys) {
    Py_ssize_t count = count_keys(keys);
    PyObject *indices = count < 0 ? NULL : PyList_New(0);
    for (Py_ssize_t i = 0; indices != NULL && i < count; i++) {
        double index = offered_index((Reuse *)object, PyList_GetItem(keys, i));
        PyObject *number = index < 0 ? NULL : PyFloat_FromDouble(index);
        if (number == NULL || PyList_Append(indices, number) < 0) Py_CLEAR(indices);
        Py_XDECREF(number);
    }
    return indices;
}

/* Return how many of the first `count` victims are worth less than the newcomers that need their slots. Of
 * the first `num_keys` newcomers the last are refused first. -1 with an exception set. */
static Py_ssize_t count_worth(const Reuse *self, PyObject *newcomers, Py_ssize_t num_keys,
                              const Array *victims, Py_ssize_t count, double now, double admission) {
    Py_ssize_t taken = 0;
    double offered = -1;
    while (taken < count) {
        double needed = admission * index_of(self, chunk_at(&self->chunks, get(victims, taken)), now, NULL);
        /* The last key that is not refused yet is the next to be refused. */
        if (offered < 0) offered = offered_index(self, PyList_GetItem(newcomers, num_keys - 1));
        if (offered < 0) return -1;
        if (offered >= needed) {
            taken++;
        } else {
            count--;
            num_keys--;
            offered = -1;
        }
    }
    return taken;
}

/* One call, because each call from Python takes as long as some slots. */
static PyObject *reuse_take_for(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    Reuse *self = (Reuse *)object;
    Array stored_by, out;
    Py_ssize_t listed, others = 0, taken = -1;
    if (num_args != 7) return PyErr_Format(PyExc_TypeError, "expected 7 arguments, got %zd", num_args);
    Py_ssize_t num_keys = count_keys(args[0]), count = PyLong_AsSsize_t(args[1]);
    double now = PyFloat_AsDouble(args[3]), admission = PyFloat_AsDouble(args[4]);
    int64_t user = PyLong_AsLongLong(args[6]);
    if (PyErr_Occurred() || borrow(args[5], 8, 0, &stored_by) < 0) return NULL;
    PyObject *slots = order_some(self, count, args[2], now, &out, &listed);
    if (slots == NULL) {
        give_back(&stored_by);
        return NULL;
    }
    if (stored_by.count < self->capacity || num_keys < listed) {
        PyErr_SetString(PyExc_ValueError, "expected a user for each slot, and a key for each victim");
    } else {
        while (others < listed && get(&stored_by, get(&out, others)) != user) others++;
        taken = count_worth(self, args[0], num_keys - listed + others, &out, others, now, admission);
        if (taken >= 0 && refuse_from(self, args[0], num_keys - listed + taken, now) < 0) taken = -1;
        if (taken > 0) leave_all(self, &out, taken, now);
    }
    give_back(&stored_by);
    return leading_part(slots, &out, taken);
}

/* -- what is learnt */

/* Count idle times that have not ended, of sampled chunks from the `start`th on, in a table like `used`. */
static PyObject *reuse_count_idle(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    Reuse *self = (Reuse *)object;
    Array counts;
    if (num_args != 4) return PyErr_Format(PyExc_TypeError, "expected 4 arguments, got %zd", num_args);
    Py_ssize_t start = PyLong_AsSsize_t(args[0]), stop = PyLong_AsSsize_t(args[1]);
    double now = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred() || borrow(args[3], 8, 1, &counts) < 0) return NULL;
    int fits = counts.count == self->used.count && start >= 0;
    Py_ssize_t held = (self->capacity + self->every - 1) / self->every;
    for (Py_ssize_t i = start; fits && i < stop; i++) {
        const Array *chunks = i < held ? &self->chunks : &self->gone;
        Py_ssize_t number = (i < held ? i : i - held) * self->every;
        if (number >= chunks->count) break;
        count_idle(self, &counts, chunk_at(chunks, number), number, now);
    }
    give_back(&counts);
    if (fits) return Py_NewRef(Py_None);
    return PyErr_Format(PyExc_ValueError, "expected a number for each class and bin");
}

/* The idle times of a class, or of several: how many ended in a use in each bin, and how many reached it. */
typedef struct {
    double used[MOST_BINS], reached[MOST_BINS];
} Times;

static void add_times(const Reuse *self, const Array *idle, Py_ssize_t class, Times *times) {
    double later = 0;
    for (Py_ssize_t bin = self->num_bins - 1; bin >= 0; bin--) {
        Py_ssize_t at = class * self->num_bins + bin;
        double used = number(&self->used, at);
        later += used + number(&self->given_up, at) + number(idle, at);
        times->used[bin] += used;
        times->reached[bin] += later;
    }
}

/* Write the index of each bin: the highest ratio of hits and seconds, over all ends of waiting. Going back
 * from the last bin, a stretch of bins takes in the next one as long as that raises its ratio. */
static void index_bins(const Reuse *self, const double *chances, double *indices) {
    double hits[MOST_BINS], seconds[MOST_BINS], alive = 1;
    Py_ssize_t count = self->num_bins, next[MOST_BINS + 1];
    for (Py_ssize_t bin = 0; bin < count; bin++) {
        double age = number(&self->ages, bin);
        double width = bin + 1 < count ? number(&self->ages, bin + 1) - age : age * 0.4142135623730951;
        hits[bin] = alive * chances[bin];
        seconds[bin] = alive * (1 - chances[bin] / 2) * width;
        alive *= 1 - chances[bin];
    }
    for (Py_ssize_t bin = count - 1; bin >= 0; bin--) {
        Py_ssize_t after = bin + 1;
        indices[bin] = hits[bin] / seconds[bin];
        while (after < count && indices[after] > indices[bin]) {
            hits[bin] += hits[after];
            seconds[bin] += seconds[after];
            indices[bin] = hits[bin] / seconds[bin];
            after = next[after];
        }
        next[bin] = after;
    }
}

/* Write the chance of a use in each bin, for a chunk that has reached it. With few idle times, it leans on
 * the chances `leant_on`, times what fits best. */
static void find_chances(const Reuse *self, const Times *times, const double *leant_on, double shrinkage,
                         double *chances) {
    double used = 1, expected = 1;
    for (Py_ssize_t bin = 0; bin < self->num_bins; bin++) {
        used += times->used[bin];
        expected += times->reached[bin] * leant_on[bin];
    }
    for (Py_ssize_t bin = 0; bin < self->num_bins; bin++) {
        double others = shrinkage * used / expected * leant_on[bin];
        double chance = (times->used[bin] + others) / (times->reached[bin] + shrinkage);
        chances[bin] = chance < 0.95 ? chance : 0.95;
    }
}

/* Make the indices of one ending and bin rise with the uses: where they fall, several take their mean, each
 * with its weight. A head of a prefix has at least the uses of its tail, so it must not be worth less. */
static void raise_with_uses(const Reuse *self, const double *weights, Py_ssize_t at) {
    Py_ssize_t step = self->num_endings * self->num_bins, cells = self->num_classes * self->num_bins;
    double means[255], sums[255];
    Py_ssize_t lengths[255], count = 0;
    for (Py_ssize_t cell = at; cell < cells; cell += step) {
        double mean = number(&self->indices, cell), sum = weights[cell];
        Py_ssize_t length = 1;
        for (; count > 0 && means[count - 1] > mean; count--) {
            mean = (mean * sum + means[count - 1] * sums[count - 1]) / (sum + sums[count - 1]);
            sum += sums[count - 1];
            length += lengths[count - 1];
        }
        means[count] = mean;
        sums[count] = sum;
        lengths[count++] = length;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        for (; lengths[i] > 0; lengths[i]--, at += step) *number_at(&self->indices, at) = means[i];
    }
}

static void derive_all(Reuse *self, const Array *idle, const Array *guess, double shrinkage) {
    double guessed[MOST_BINS] = {0}, pooled[MOST_BINS] = {0}, group[MOST_BINS] = {0};
    double chances[MOST_BINS], weights[255 * MOST_BINS];
    Times all = {0};
    for (Py_ssize_t bin = 0; bin < self->num_bins; bin++) guessed[bin] = number(guess, bin);
    for (Py_ssize_t class = 0; class < self->num_classes; class++) add_times(self, idle, class, &all);
    find_chances(self, &all, guessed, shrinkage, pooled);
    for (Py_ssize_t class = self->num_classes - 1; class >= 0; class--) {
        Py_ssize_t ending = class % self->num_endings;
        int is_group = ending == self->num_endings - 1; /* the class that stands for all endings */
        Times times = {0};
        for (Py_ssize_t each = is_group ? class - ending : class; each <= class; each++)
            add_times(self, idle, each, &times);
        double *own = is_group ? group : chances;
        find_chances(self, &times, is_group ? pooled : group, shrinkage, own);
        double indices[MOST_BINS];
        index_bins(self, own, indices);
        for (Py_ssize_t bin = 0; bin < self->num_bins; bin++) {
            *number_at(&self->indices, class * self->num_bins + bin) = indices[bin];
            weights[class * self->num_bins + bin] = times.reached[bin] + shrinkage;
        }
    }
    for (Py_ssize_t at = 0; at < self->num_endings * self->num_bins; at++) {
        raise_with_uses(self, weights, at);
    }
}

static PyObject *reuse_derive(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    Reuse *self = (Reuse *)object;
    Array idle, guess;
    if (num_args != 3) return PyErr_Format(PyExc_TypeError, "expected 3 arguments, got %zd", num_args);
    double shrinkage = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred() || borrow(args[0], 8, 0, &idle) < 0) return NULL;
    if (borrow(args[1], 8, 0, &guess) < 0) {
        give_back(&idle);
        return NULL;
    }
    int fits = idle.count == self->used.count && guess.count == self->num_bins;
    if (fits) derive_all(self, &idle, &guess, shrinkage);
    give_back(&idle);
    give_back(&guess);
    if (fits) return Py_NewRef(Py_None);
    return PyErr_Format(PyExc_ValueError, "expected a number for each class and bin, and for each bin");
}

static Py_ssize_t reuse_length(PyObject *self) { return ((Reuse *)self)->length; }

static void reuse_dealloc(PyObject *object) {
    Reuse *self = (Reuse *)object;
    PyMem_Free(self->newer);
    PyMem_Free(self->older);
    PyMem_Free(self->hashes);
    free_ghosts(&self->ghosts);
    give_back(&self->chunks);
    give_back(&self->gone);
    give_back(&self->used);
    give_back(&self->given_up);
    give_back(&self->indices);
    give_back(&self->ages);
    give_back(&self->lean);
    free_object(object);
}

/* Make the lists of the borrowed arrays; -1 with an exception set if they do not fit together. */
static int make_lists(Reuse *self) {
    Py_ssize_t capacity = self->capacity = self->chunks.count, cells = self->used.count;
    self->num_bins = self->ages.count;
    if (check_capacity(capacity) < 0 || check_capacity(self->gone.count) < 0) return -1;
    if (self->num_bins < 1 || self->num_bins > MOST_BINS || cells % self->num_bins != 0 ||
        self->given_up.count != cells || self->indices.count != cells ||
        self->lean.count != self->num_bins) {
        PyErr_SetString(PyExc_ValueError, "expected tables of one size, for 1 to 64 bins of age");
        return -1;
    }
    self->num_classes = cells / self->num_bins;
    if (self->num_classes < 1 || self->num_classes > 255 || self->num_endings < 1 || self->every < 1 ||
        self->num_classes % self->num_endings != 0) {
        PyErr_SetString(PyExc_ValueError, "expected 1 to 255 classes, equally many for each ending");
        return -1;
    }
    size_t links = (size_t)(capacity + self->num_classes);
    self->newer = PyMem_Malloc(links * sizeof *self->newer);
    self->older = PyMem_Malloc(links * sizeof *self->older);
    self->hashes = PyMem_Malloc((size_t)capacity * sizeof *self->hashes);
    if (self->newer == NULL || self->older == NULL || self->hashes == NULL ||
        make_ghosts(&self->ghosts, self->gone.count, 1) < 0) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t slot = 0; slot < capacity; slot++) self->newer[slot] = NONE;
    for (size_t end = (size_t)capacity; end < links; end++) {
        self->newer[end] = self->older[end] = (int32_t)end;
    }
    return 0;
}

static PyObject *reuse_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *chunks, *gone, *used, *given_up, *indices, *ages, *lean;
    Py_ssize_t num_endings, every;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OOOOOOOnn", &chunks, &gone, &used, &given_up, &indices, &ages, &lean,
                          &num_endings, &every)) return NULL;
    Reuse *self = (Reuse *)new_object(type);
    if (self == NULL) return NULL;
    self->num_endings = num_endings;
    self->every = every;
    if (borrow(chunks, sizeof(Chunk), 1, &self->chunks) < 0 ||
        borrow(gone, sizeof(Chunk), 1, &self->gone) < 0 || borrow(used, 8, 1, &self->used) < 0 ||
        borrow(given_up, 8, 1, &self->given_up) < 0 || borrow(indices, 8, 1, &self->indices) < 0 ||
        borrow(ages, 8, 0, &self->ages) < 0 || borrow(lean, 8, 0, &self->lean) < 0 || make_lists(self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyMethodDef reuse_methods[] = {
    {"insert", (PyCFunction)(void (*)(void))reuse_insert, METH_FASTCALL, NULL},
    {"use", (PyCFunction)(void (*)(void))reuse_use, METH_FASTCALL, NULL},
    {"order", (PyCFunction)(void (*)(void))reuse_order, METH_FASTCALL, NULL},
    {"offered", reuse_offered, METH_O, NULL},
    {"take_for", (PyCFunction)(void (*)(void))reuse_take_for, METH_FASTCALL, NULL},
    {"leave", (PyCFunction)(void (*)(void))reuse_leave, METH_FASTCALL, NULL},
    {"refuse", (PyCFunction)(void (*)(void))reuse_refuse, METH_FASTCALL, NULL},
    {"remove", (PyCFunction)(void (*)(void))reuse_remove, METH_FASTCALL, NULL},
    {"count_idle", (PyCFunction)(void (*)(void))reuse_count_idle, METH_FASTCALL, NULL},
    {"derive", (PyCFunction)(void (*)(void))reuse_derive, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot reuse_slots[] = {
    {Py_tp_new, reuse_new},       {Py_tp_dealloc, reuse_dealloc}, {Py_tp_methods, reuse_methods},
    {Py_mp_length, reuse_length}, {0, NULL},
};
static PyType_Spec reuse_spec = {"kvtier.native._slots.ReuseLists", sizeof(Reuse), 0, Py_TPFLAGS_DEFAULT,
                                 reuse_slots};

/* -- the module ----------------------------------------------------------------------------------------- */

static int add_type(PyObject *module, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    int status = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return status;
}

/* Derive the secrets from Python's hash seed, which is random unless PYTHONHASHSEED sets it. */
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

static int find_numpy(void) {
    PyObject *numpy = PyImport_ImportModule("numpy");
    if (numpy == NULL) return -1;
    numpy_empty = PyObject_GetAttrString(numpy, "empty");
    int64_type = PyObject_CallMethod(numpy, "dtype", "s", "int64");
    Py_DECREF(numpy);
    return numpy_empty == NULL || int64_type == NULL ? -1 : 0;
}

static int fill_module(PyObject *module) {
    if (draw_secrets() < 0 || find_numpy() < 0) return -1;
    return add_type(module, &book_spec) < 0 || add_type(module, &ghosts_spec) < 0 ||
           add_type(module, &recency_spec) < 0 || add_type(module, &reuse_spec) < 0 ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill_module}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_slots", NULL, 0, NULL, slots, NULL, NULL,
                                        NULL};

PyMODINIT_FUNC PyInit__slots(void) { return PyModuleDef_Init(&definition); }
