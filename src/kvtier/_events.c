/* The steps of publishing that touch every block and every token: writing an event, holding its blocks, collecting those that
 * an engine removes one by one, and letting them go. Optional: where this was not compiled, `kvtier.events.publish.hot` does the same in Python;
 * what is promised is written there, and tests/unit/test_events_hot.py holds the two against each other.
 *
 * A thousand tokens are a thousand ints, and the time goes into asking each what it is. So this looks into lists, ints and the slots
 * of structs directly, which the limited API does not allow: a binary serves the one version of Python that it was compiled for.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <endian.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <unistd.h>

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

/* -- scratch --------------------------------------------------------------------------------------------------------------- */

static void *scratch; /* what is being worked on; whoever holds the GIL has it */
static size_t scratch_size;

static int make_room(size_t room) {
    if (room <= scratch_size) return 0;
    void *grown = PyMem_Realloc(scratch, 2 * room);
    if (grown == NULL) return PyErr_NoMemory(), -1;
    scratch = grown;
    scratch_size = 2 * room;
    return 0;
}

/* -- msgpack --------------------------------------------------------------------------------------------------------------- */

enum { MOST_INT = 9, MOST_HEAD = 5 };

static inline uint8_t *put(uint8_t *out, uint8_t tag, uint64_t value, int size) {
    *out++ = tag;
    while (size--) *out++ = (uint8_t)(value >> 8 * size);
    return out;
}

/* Write an int; up to 8 bytes behind it are overwritten. Tokens have random lengths, which a branch cannot foresee: so none. */
static inline uint8_t *put_uint(uint8_t *out, uint64_t value) {
    static const uint64_t tags[] = {0, 0, 0xcc00, 0xcd0000, 0, 0xce00000000};
    int size = 8;
    uint64_t word = value;
    if (value > UINT32_MAX) {
        *out++ = 0xcf;
    } else {
        size = 1 + (value > 0x7f) + (value > 0xff) + 2 * (value > 0xffff);
        word = (tags[size] | value) << 8 * (8 - size);
    }
    word = htobe64(word);
    memcpy(out, &word, 8);
    return out + size;
}

static inline uint8_t *put_text(uint8_t *out, const char *text, size_t size) {
    if (size < 32) *out++ = (uint8_t)(0xa0 | size);
    else if (size <= 0xff) out = put(out, 0xd9, size, 1);
    else if (size <= 0xffff) out = put(out, 0xda, size, 2);
    else out = put(out, 0xdb, size, 4);
    memcpy(out, text, size);
    return out + size;
}

/* Write a list of ints; NULL if it is something else. There is room for it. */
static uint8_t *put_uints(uint8_t *out, PyObject *list) {
    Py_ssize_t count = PyList_GET_SIZE(list);
    if (count < 16) *out++ = (uint8_t)(0x90 | count);
    else if (count <= 0xffff) out = put(out, 0xdc, (uint64_t)count, 2);
    else out = put(out, 0xdd, (uint64_t)count, 4);
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t value;
        if (!read_uint(PyList_GET_ITEM(list, i), &value)) return NULL;
        out = put_uint(out, value);
    }
    return out;
}

/* -- events ------------------------------------------------------------------------------------------------------------------ */

/* A kind of event. `at` says where the fields are in instances of `type`, the class that was met last; ours, or an engine's own. */
enum { MOST_FIELDS = 14, HASHES = 0, PLACE = 1 };
typedef struct {
    const char *name;
    int fields, required, hashes; /* how many there are; how many are written also if they are None; how many are hashes */
    const char *names[MOST_FIELDS];
    PyTypeObject *type;
    Py_ssize_t at[MOST_FIELDS];
} Kind;

static Kind kinds[] = {
    {"BlockStored", 14, 7, 2, {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
     "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id"}, NULL, {0}},
    {"BlockRemoved", 5, 2, 1, {"block_hashes", "medium", "group_idx", "locality", "ownership"}, NULL, {0}},
};
static Kind *const removed = &kinds[1];

/* Find out where a field is; 0 if it is not a plain slot that comes at that place, perhaps with an exception set. */
static int learn_field(Kind *kind, PyTypeObject *type, PyObject *fields, int i) {
    PyObject *name = PyTuple_GET_ITEM(fields, i);
    if (!PyUnicode_Check(name) || PyUnicode_CompareWithASCIIString(name, kind->names[i]) != 0) return 0;
    PyObject *slot = PyObject_GetAttr((PyObject *)type, name);
    int plain = slot != NULL && Py_IS_TYPE(slot, &PyMemberDescr_Type) && ((PyMemberDescrObject *)slot)->d_member->type == T_OBJECT_EX;
    if (plain) kind->at[i] = ((PyMemberDescrObject *)slot)->d_member->offset;
    Py_XDECREF(slot);
    return plain;
}

/* Return the kind that a class is of; NULL if it is of none, or has other fields. */
static Kind *kind_of(PyTypeObject *type) {
    for (size_t k = 0; k < Py_ARRAY_LENGTH(kinds); k++)
        if (kinds[k].type == type) return &kinds[k];
    for (size_t k = 0; k < Py_ARRAY_LENGTH(kinds); k++) {
        if (strcmp(type->tp_name, kinds[k].name) != 0) continue;
        Py_CLEAR(kinds[k].type);
        PyObject *fields = PyObject_GetAttrString((PyObject *)type, "__struct_fields__");
        int known = fields != NULL && PyTuple_CheckExact(fields) && PyTuple_GET_SIZE(fields) == kinds[k].fields;
        for (int i = 0; i < kinds[k].fields && known; i++) known = learn_field(&kinds[k], type, fields, i);
        Py_XDECREF(fields);
        PyErr_Clear();
        if (!known) return NULL;
        kinds[k].type = (PyTypeObject *)Py_NewRef((PyObject *)type);
        return &kinds[k];
    }
    return NULL;
}

static inline PyObject *field_of(const Kind *kind, PyObject *event, int i) {
    return *(PyObject **)((char *)event + kind->at[i]);
}

/* Say how many bytes a field's value takes at most; 0 if it is of a type that is left to Python. */
static size_t room_for(const Kind *kind, int i, PyObject *value) {
    if (value == NULL) return 0;
    if (PyList_CheckExact(value)) return i > HASHES && i < kind->hashes ? 0 : MOST_HEAD + MOST_INT * (size_t)PyList_GET_SIZE(value);
    if (i == HASHES) return 0;
    if (PyUnicode_CheckExact(value) && i >= kind->hashes) {
        Py_ssize_t size;
        return PyUnicode_AsUTF8AndSize(value, &size) == NULL ? 0 : MOST_HEAD + (size_t)size;
    }
    return value == Py_None || PyLong_CheckExact(value) ? MOST_INT : 0;
}

static uint8_t *put_value(uint8_t *out, PyObject *value) {
    if (value == Py_None) return put(out, 0xc0, 0, 0);
    if (PyList_CheckExact(value)) return put_uints(out, value);
    if (PyUnicode_CheckExact(value)) {
        Py_ssize_t size;
        const char *text = PyUnicode_AsUTF8AndSize(value, &size);
        return put_text(out, text, (size_t)size);
    }
    uint64_t number;
    return read_uint(value, &number) ? put_uint(out, number) : NULL;
}

/* Write the event to the scratch; return its end, or NULL if it is left to Python. Nobody else runs, so it stays as it is. */
static uint8_t *put_event(const Kind *kind, PyObject *event) {
    size_t room = 64;
    int count = 1;
    for (int i = 0; i < kind->fields; i++) {
        PyObject *value = field_of(kind, event, i);
        size_t needed = room_for(kind, i, value);
        if (needed == 0) return NULL;
        room += needed + 32; /* the longest name has 28 letters */
        count += i < kind->required || value != Py_None;
    }
    if (make_room(room) < 0) return NULL;
    uint8_t *out = put(scratch, (uint8_t)(0x80 | count), 0, 0);
    out = put_text(put_text(out, "type", 4), kind->name, strlen(kind->name));
    for (int i = 0; i < kind->fields && out != NULL; i++) {
        PyObject *value = field_of(kind, event, i);
        if (i < kind->required || value != Py_None) out = put_value(put_text(out, kind->names[i], strlen(kind->names[i])), value);
    }
    return out;
}

static PyObject *encode_plain(PyObject *module, PyObject *event) {
    (void)module;
    Kind *kind = kind_of(Py_TYPE(event));
    uint8_t *end = kind == NULL ? NULL : put_event(kind, event);
    if (end != NULL) return PyBytes_FromStringAndSize(scratch, end - (uint8_t *)scratch);
    PyErr_Clear(); /* Python finds the same fault, and says it better */
    Py_RETURN_NONE;
}

/* -- removals ---------------------------------------------------------------------------------------------------------------- */

/* Say whether two removals are from one place: 1, 0, or -1 with an exception set. */
static int is_same_place(PyObject *one, PyObject *other) {
    int same = 1;
    for (int i = PLACE; i < removed->fields && same == 1; i++) {
        PyObject *mine = field_of(removed, one, i), *its = field_of(removed, other, i);
        if (mine == its) continue;
        same = mine == NULL || its == NULL ? 0 : PyObject_RichCompareBool(mine, its, Py_EQ);
    }
    return same;
}

static PyObject *join_removals(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    Py_ssize_t stop = count == 2 ? PyLong_AsSsize_t(arguments[1]) : -1;
    if (stop < 0 || !PyList_CheckExact(arguments[0]) || stop >= PyList_GET_SIZE(arguments[0]))
        return PyErr_SetString(PyExc_TypeError, "expected a list of events and the place of one"), NULL;
    PyObject *events = arguments[0], *first = Py_NewRef(PyList_GET_ITEM(events, stop)), *hashes = NULL;
    int there = kind_of(Py_TYPE(first)) == removed ? 1 : -1;
    if (there == 1) hashes = PyList_New(0);
    while (hashes != NULL && stop < PyList_GET_SIZE(events)) {
        PyObject *event = PyList_GET_ITEM(events, stop);
        there = Py_IS_TYPE(event, removed->type) ? is_same_place(first, event) : 0;
        if (there != 1) break;
        PyObject *more = field_of(removed, event, HASHES);
        there = -1;
        if (more == NULL || !PyList_CheckExact(more)) break;
        Py_ssize_t end = PyList_GET_SIZE(hashes);
        if (PyList_GET_SIZE(more) == 1 ? PyList_Append(hashes, PyList_GET_ITEM(more, 0)) : PyList_SetSlice(hashes, end, end, more)) break;
        there = 1;
        stop++;
    }
    Py_DECREF(first);
    if (there >= 0 && hashes != NULL) return Py_BuildValue("Nn", hashes, stop);
    Py_XDECREF(hashes);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* -- blocks ------------------------------------------------------------------------------------------------------------------ */

/* Hashes and their numbers, in a table with linear probing. A slot whose number is 0 is empty; three of four are in use at most. */
typedef struct __attribute__((packed)) {
    uint64_t hash;
    uint32_t number;
} Slot;

typedef struct {
    PyObject_HEAD
    Slot *slots;
    size_t used;
    int bits;
} Blocks;

enum { LEAST_BITS = 6 };

static inline size_t mask_of(const Blocks *self) { return ((size_t)1 << self->bits) - 1; }

static inline size_t home_of(const Blocks *self, uint64_t hash) { return (size_t)(hash * 0x9E3779B97F4A7C15 >> (64 - self->bits)); }

/* Return the place of a hash, or the empty one where it would go. */
static inline size_t find(const Blocks *self, uint64_t hash) {
    size_t place = home_of(self, hash);
    while (self->slots[place].number != 0 && self->slots[place].hash != hash) place = (place + 1) & mask_of(self);
    return place;
}

/* Empty a place; those behind it that it kept from their home move up. */
static void empty(Blocks *self, size_t hole) {
    size_t mask = mask_of(self);
    for (size_t next = (hole + 1) & mask; self->slots[next].number != 0; next = (next + 1) & mask) {
        if (((next - home_of(self, self->slots[next].hash)) & mask) < ((next - hole) & mask)) continue;
        self->slots[hole] = self->slots[next];
        hole = next;
    }
    self->slots[hole].number = 0;
    self->used--;
}

static int reserve(Blocks *self, size_t more) {
    int bits = self->bits;
    while (4 * (self->used + more) > (size_t)3 << bits) bits++;
    if (bits == self->bits) return 0;
    Blocks old = *self;
    Slot *slots = PyMem_Calloc((size_t)1 << bits, sizeof(Slot));
    if (slots == NULL) return PyErr_NoMemory(), -1;
    self->slots = slots;
    self->bits = bits;
    for (size_t i = 0; i <= mask_of(&old); i++)
        if (old.slots[i].number != 0) slots[find(self, old.slots[i].hash)] = old.slots[i];
    PyMem_Free(old.slots);
    return 0;
}

static int read_hash(PyObject *object, uint64_t *hash) {
    if (read_uint(object, hash)) return 0;
    PyErr_Format(PyExc_TypeError, "a block hash is an int from 0 to 2^64 - 1 here, not %.100R", object);
    return -1;
}

/* Read the hashes of a list or tuple into the scratch, and fetch their slots; return how many, -1 with an exception set. */
static Py_ssize_t read_hashes(const Blocks *self, PyObject *hashes) {
    if (!PyList_CheckExact(hashes) && !PyTuple_CheckExact(hashes))
        return PyErr_Format(PyExc_TypeError, "expected a list or tuple of block hashes, not %.100R", hashes), -1;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(hashes);
    if (make_room((size_t)count * sizeof(uint64_t)) < 0) return -1;
    uint64_t *read = scratch;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (read_hash(PySequence_Fast_GET_ITEM(hashes, i), &read[i]) < 0) return -1;
        __builtin_prefetch(&self->slots[home_of(self, read[i])], 1);
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
    if (count != 2) return PyErr_SetString(PyExc_TypeError, "expected hashes and a number"), NULL;
    Py_ssize_t size = read_hashes(self, arguments[0]), done = 0;
    if (size < 0 || read_number(arguments[1], &number) < 0 || reserve(self, (size_t)size) < 0) return NULL;
    uint64_t *hashes = scratch, sum = 0;
    for (; done < size; done++) {
        size_t place = find(self, hashes[done]);
        if (self->slots[place].number != 0) break;
        self->slots[place].hash = hashes[done];
        self->slots[place].number = number;
        self->used++;
        sum += hashes[done];
    }
    if (done == size) return PyLong_FromUnsignedLongLong(sum);
    while (done--) empty(self, find(self, hashes[done]));
    Py_RETURN_NONE;
}

/* Append `[number, times]`, or one more time to the last one; -1 with an exception set. */
static int add_run(PyObject *runs, uint32_t number, Py_ssize_t times) {
    PyObject *run = times == 0 ? NULL : Py_BuildValue("In", number, times);
    int status = times == 0 ? 0 : run == NULL ? -1 : PyList_Append(runs, run);
    Py_XDECREF(run);
    return status;
}

/* Take out the hashes that were read; list those that were there in `gone` unless all were, and their numbers in `runs`. */
static int drop_all(Blocks *self, PyObject *names, Py_ssize_t size, PyObject **gone, PyObject *runs, uint64_t *sum) {
    uint64_t *hashes = scratch;
    uint32_t last = 0;
    Py_ssize_t times = 0;
    for (Py_ssize_t i = 0; i < size; i++) {
        size_t place = find(self, hashes[i]);
        uint32_t number = self->slots[place].number;
        if (number == 0) {
            if (*gone == NULL && (*gone = PyList_GetSlice(names, 0, i)) == NULL) return -1;
            continue;
        }
        if (*gone != NULL && PyList_Append(*gone, PyList_GET_ITEM(names, i)) < 0) return -1;
        empty(self, place);
        *sum += hashes[i];
        if (number != last && add_run(runs, last, times) < 0) return -1;
        times = number == last ? times + 1 : 1;
        last = number;
    }
    return add_run(runs, last, times);
}

static PyObject *drop(Blocks *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2 || !PyList_CheckExact(arguments[0]) || !Py_IS_TYPE(arguments[1], Py_TYPE(self)))
        return PyErr_SetString(PyExc_TypeError, "expected a list of hashes and a table of the same kind"), NULL;
    PyObject *names = arguments[0], *gone = NULL;
    const Blocks *children = (Blocks *)arguments[1];
    Py_ssize_t size = read_hashes(self, names);
    for (Py_ssize_t i = 0; i < size; i++)
        if (children->slots[find(children, ((uint64_t *)scratch)[i])].number != 0) Py_RETURN_NONE;
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
    return read_hash(object, &hash) < 0 ? NULL : PyLong_FromUnsignedLong(self->slots[find(self, hash)].number);
}

static PyObject *put_number(Blocks *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t hash;
    uint32_t number;
    if (count != 2) return PyErr_SetString(PyExc_TypeError, "expected a hash and a number"), NULL;
    if (read_hash(arguments[0], &hash) < 0 || read_number(arguments[1], &number) < 0 || reserve(self, 1) < 0) return NULL;
    Slot *slot = &self->slots[find(self, hash)];
    self->used += slot->number == 0;
    slot->hash = hash;
    slot->number = number;
    Py_RETURN_NONE;
}

static PyObject *pop(Blocks *self, PyObject *object) {
    uint64_t hash;
    if (read_hash(object, &hash) < 0) return NULL;
    size_t place = find(self, hash);
    uint32_t number = self->slots[place].number;
    if (number != 0) empty(self, place);
    return PyLong_FromUnsignedLong(number);
}

static PyObject *count_of(Blocks *self, PyObject *const *arguments, Py_ssize_t count) {
    uint32_t number;
    if (count != 2) return PyErr_SetString(PyExc_TypeError, "expected hashes and a number"), NULL;
    Py_ssize_t size = read_hashes(self, arguments[0]), found = 0;
    if (size < 0 || read_number(arguments[1], &number) < 0) return NULL;
    for (Py_ssize_t i = 0; i < size; i++) found += self->slots[find(self, ((uint64_t *)scratch)[i])].number == number;
    return PyLong_FromSsize_t(found);
}

static PyObject *new_blocks(PyTypeObject *type, size_t used, int bits) {
    Blocks *self = (Blocks *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->used = used;
    self->bits = bits;
    self->slots = PyMem_Calloc((size_t)1 << bits, sizeof(Slot));
    if (self->slots != NULL) return (PyObject *)self;
    Py_DECREF(self);
    return PyErr_NoMemory();
}

static PyObject *make_blocks(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    (void)keywords;
    if (PyTuple_GET_SIZE(arguments) != 0) return PyErr_SetString(PyExc_TypeError, "Blocks() takes no arguments"), NULL;
    return new_blocks(type, 0, LEAST_BITS);
}

static PyObject *copy(Blocks *self, PyObject *unused) {
    (void)unused;
    PyObject *made = new_blocks(Py_TYPE(self), self->used, self->bits);
    if (made != NULL) memcpy(((Blocks *)made)->slots, self->slots, (mask_of(self) + 1) * sizeof(Slot));
    return made;
}

static void free_blocks(Blocks *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyMem_Free(self->slots);
    type->tp_free(self);
    Py_DECREF(type);
}

static Py_ssize_t length(Blocks *self) { return (Py_ssize_t)self->used; }

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

/* -- waking ------------------------------------------------------------------------------------------------------------------- */

/* The write does not block, so the GIL is kept: given up, it goes to the thread that was woken, and the caller waits for it. */
static PyObject *wake(PyObject *module, PyObject *fd) {
    (void)module;
    const uint64_t one = 1;
    int number = (int)PyLong_AsLong(fd);
    if (number == -1 && PyErr_Occurred()) return NULL;
    return PyBool_FromLong(write(number, &one, sizeof one) == sizeof one);
}

/* -- the module ---------------------------------------------------------------------------------------------------------- */

static int fill_module(PyObject *module) {
    PyObject *type = PyType_FromSpec(&blocks_spec);
    int status = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return status;
}

static PyMethodDef methods[] = {
    {"encode_plain", encode_plain, METH_O, NULL},
    {"join_removals", (PyCFunction)(void (*)(void))join_removals, METH_FASTCALL, NULL},
    {"wake", wake, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill_module}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_events", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__events(void) { return PyModuleDef_Init(&definition); }
