/* The steps of publishing that touch every block and every token: writing a stored event, holding its blocks, collecting those that
 * an engine removes one by one, and letting them go. Optional: where this was not compiled, `kvtier.events.hot` does the same in Python; what the functions promise is written there, and
 * tests/unit/test_events_hot.py holds the two against each other.
 *
 * A thousand tokens are a thousand ints, and the time goes into asking each what it is. So this looks into lists and ints directly,
 * which the limited API does not allow: a binary serves the one version of Python that it was compiled for.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
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

/* -- msgpack --------------------------------------------------------------------------------------------------------------- */

enum { MOST_INT = 9, MOST_HEAD = 5 };

static uint8_t *scratch; /* what is being written; whoever holds the GIL has it */
static size_t scratch_size;

static inline uint8_t *put(uint8_t *out, uint8_t tag, uint64_t value, int size) {
    *out++ = tag;
    while (size--) *out++ = (uint8_t)(value >> 8 * size);
    return out;
}

static inline uint8_t *put_uint(uint8_t *out, uint64_t value) {
    if (value < 0x80) return put(out, (uint8_t)value, 0, 0);
    if (value <= 0xff) return put(out, 0xcc, value, 1);
    if (value <= 0xffff) return put(out, 0xcd, value, 2);
    if (value <= 0xffffffff) return put(out, 0xce, value, 4);
    return put(out, 0xcf, value, 8);
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

/* -- a stored event ---------------------------------------------------------------------------------------------------------- */

enum { HASHES, PARENT, TOKENS, BLOCK_SIZE, LORA_ID, MEDIUM, LORA_NAME, EXTRA_KEYS, FIELDS = 14, REQUIRED = LORA_NAME + 1 };
static const char *const names[FIELDS] = {
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id"};
static PyObject *interned[FIELDS];

/* Say how many bytes a field's value takes at most; 0 if it is of a kind that is left to Python. */
static size_t room_for(int field, PyObject *value) {
    if (field == HASHES || field == TOKENS)
        return PyList_CheckExact(value) ? MOST_HEAD + MOST_INT * (size_t)PyList_GET_SIZE(value) : 0;
    if (field == EXTRA_KEYS) return value == Py_None;
    if (PyUnicode_CheckExact(value)) {
        Py_ssize_t size;
        return PyUnicode_AsUTF8AndSize(value, &size) == NULL ? 0 : MOST_HEAD + (size_t)size;
    }
    return value == Py_None || PyLong_CheckExact(value) ? MOST_INT : 0;
}

static uint8_t *put_value(uint8_t *out, int field, PyObject *value) {
    if (field == HASHES || field == TOKENS) return put_uints(out, value);
    if (value == Py_None) return put(out, 0xc0, 0, 0);
    if (PyUnicode_CheckExact(value)) {
        Py_ssize_t size;
        const char *text = PyUnicode_AsUTF8AndSize(value, &size);
        return put_text(out, text, (size_t)size);
    }
    uint64_t number;
    return read_uint(value, &number) ? put_uint(out, number) : NULL;
}

/* Write `[ts, [event], tail` to the scratch; return its end, or NULL if the event is left to Python. */
static uint8_t *put_batch(double ts, PyObject **values, PyObject *tail) {
    uint64_t bits;
    int count = 1;
    for (int i = 0; i < FIELDS; i++) count += i < REQUIRED || values[i] != Py_None;
    memcpy(&bits, &ts, 8);
    uint8_t *out = put(scratch, 0x93, 0, 0);
    out = put(out, 0xcb, bits, 8);
    *out++ = 0x91;
    *out++ = (uint8_t)(0x80 | count);
    out = put_text(put_text(out, "type", 4), "BlockStored", 11);
    for (int i = 0; i < FIELDS && out != NULL; i++) {
        if (i >= REQUIRED && values[i] == Py_None) continue;
        out = put_value(put_text(out, names[i], strlen(names[i])), i, values[i]);
    }
    if (out == NULL) return NULL;
    memcpy(out, PyBytes_AS_STRING(tail), (size_t)PyBytes_GET_SIZE(tail));
    return out + PyBytes_GET_SIZE(tail);
}

static int make_room(size_t room) {
    if (room <= scratch_size) return 0;
    uint8_t *grown = PyMem_Realloc(scratch, 2 * room);
    if (grown == NULL) return PyErr_NoMemory(), -1;
    scratch = grown;
    scratch_size = 2 * room;
    return 0;
}

static PyObject *frame_stored(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 3 || !PyFloat_Check(arguments[0]) || !PyBytes_CheckExact(arguments[2]))
        return PyErr_SetString(PyExc_TypeError, "expected a float, an event and bytes"), NULL;
    PyObject *values[FIELDS], *result = NULL;
    size_t room = 64 + (size_t)PyBytes_GET_SIZE(arguments[2]);
    int read = 0, plain = 1;
    while (read < FIELDS && (values[read] = PyObject_GetAttr(arguments[1], interned[read])) != NULL) read++;
    for (int i = 0; i < read && plain; i++) { /* from here on nobody else runs, so lists stay as long as they are */
        size_t needed = room_for(i, values[i]);
        plain = needed > 0;
        room += needed + 32; /* the longest name has 28 letters */
    }
    if (read == FIELDS && plain && make_room(room) == 0) {
        uint8_t *end = put_batch(PyFloat_AS_DOUBLE(arguments[0]), values, arguments[2]);
        if (end != NULL) result = PyBytes_FromStringAndSize((char *)scratch, end - scratch);
    }
    while (read--) Py_DECREF(values[read]);
    if (result == NULL && PyErr_Occurred()) PyErr_Clear(); /* Python finds the same fault, and says it better */
    return result != NULL ? result : Py_NewRef(Py_None);
}

/* -- blocks ------------------------------------------------------------------------------------------------------------------ */

/* Add the low 64 bits of a hash; -1 with an exception set if it is none. */
static int add_hash(PyObject *hash, uint64_t *sum) {
    uint64_t value;
    if (read_uint(hash, &value)) {
        *sum += value;
    } else if (PyLong_Check(hash)) {
        *sum += PyLong_AsUnsignedLongLongMask(hash);
    } else if (PyBytes_Check(hash)) {
        Py_ssize_t size = PyBytes_GET_SIZE(hash);
        const uint8_t *bytes = (const uint8_t *)PyBytes_AS_STRING(hash);
        value = 0;
        for (Py_ssize_t i = size < 8 ? 0 : size - 8; i < size; i++) value = value << 8 | bytes[i];
        *sum += value;
    } else {
        PyErr_Format(PyExc_TypeError, "a block hash is an int or bytes, not %.100s", Py_TYPE(hash)->tp_name);
        return -1;
    }
    return 0;
}

static int let_go(PyObject *blocks, PyObject *hashes, Py_ssize_t count, PyObject *record) {
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *hash = PyTuple_GET_ITEM(hashes, i);
        if (PyDict_GetItemWithError(blocks, hash) == record && PyDict_DelItem(blocks, hash) < 0) return -1;
    }
    return 0;
}

static PyObject *hold(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 3 || !PyDict_CheckExact(arguments[0]) || !PyTuple_CheckExact(arguments[1]))
        return PyErr_SetString(PyExc_TypeError, "expected a dict, a tuple of hashes and a record"), NULL;
    PyObject *blocks = arguments[0], *hashes = arguments[1], *record = arguments[2];
    Py_ssize_t before = PyDict_GET_SIZE(blocks), size = PyTuple_GET_SIZE(hashes), done = 0;
    uint64_t sum = 0;
    for (; done < size; done++)
        if (add_hash(PyTuple_GET_ITEM(hashes, done), &sum) < 0) return NULL;
    for (done = 0; done < size; done++) {
        PyObject *found = PyDict_SetDefault(blocks, PyTuple_GET_ITEM(hashes, done), record);
        if (found == NULL) return NULL;
        if (found != record) break;
    }
    if (PyDict_GET_SIZE(blocks) == before + size) return PyLong_FromUnsignedLongLong(sum);
    if (let_go(blocks, hashes, done, record) < 0) return NULL;
    return Py_NewRef(Py_None);
}

/* -- removals ---------------------------------------------------------------------------------------------------------------- */

enum { PLACE = 4 };
static const char *const place_names[PLACE] = {"medium", "group_idx", "locality", "ownership"};
static PyObject *place_interned[PLACE];

/* Say whether an event is in the place that `wanted` names: 1, 0, or -1 with an exception set. */
static int is_there(PyObject *event, PyObject **wanted) {
    int same = 1;
    for (int i = 0; i < PLACE && same == 1; i++) {
        PyObject *value = PyObject_GetAttr(event, place_interned[i]);
        if (value == NULL) return -1;
        same = value == wanted[i] ? 1 : PyObject_RichCompareBool(value, wanted[i], Py_EQ);
        Py_DECREF(value);
    }
    return same;
}

/* Append the event's hashes; -1 with an exception set where that fails. */
static int take_hashes(PyObject *event, PyObject *hashes) {
    PyObject *more = PyObject_GetAttr(event, interned[HASHES]);
    if (more == NULL) return -1;
    int status;
    if (PyList_CheckExact(more) && PyList_GET_SIZE(more) == 1) status = PyList_Append(hashes, PyList_GET_ITEM(more, 0));
    else status = PyList_SetSlice(hashes, PyList_GET_SIZE(hashes), PyList_GET_SIZE(hashes), more);
    Py_DECREF(more);
    return status;
}

static Py_ssize_t take_run(PyObject *events, Py_ssize_t start, PyObject **place, PyObject *hashes) {
    PyTypeObject *type = Py_TYPE(PyList_GET_ITEM(events, start));
    Py_ssize_t stop = start;
    while (stop < PyList_GET_SIZE(events)) {
        PyObject *event = PyList_GET_ITEM(events, stop);
        int there = Py_TYPE(event) == type ? is_there(event, place) : 0;
        if (there == 0) break;
        if (there < 0 || take_hashes(event, hashes) < 0) return -1;
        stop++;
    }
    return stop;
}

static PyObject *join_removals(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    Py_ssize_t start = count == 2 ? PyLong_AsSsize_t(arguments[1]) : -1;
    if (start < 0 || !PyList_CheckExact(arguments[0]) || start >= PyList_GET_SIZE(arguments[0]))
        return PyErr_SetString(PyExc_TypeError, "expected a list of events and the place of one"), NULL;
    PyObject *place[PLACE], *hashes = PyList_New(0), *result = NULL;
    int read = 0;
    while (read < PLACE && (place[read] = PyObject_GetAttr(PyList_GET_ITEM(arguments[0], start), place_interned[read])) != NULL) read++;
    if (read == PLACE && hashes != NULL) {
        Py_ssize_t stop = take_run(arguments[0], start, place, hashes);
        if (stop >= 0) result = Py_BuildValue("On", hashes, stop);
    }
    while (read--) Py_DECREF(place[read]);
    Py_XDECREF(hashes);
    return result;
}

static PyObject *drop_leaves(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 3 || !PyDict_CheckExact(arguments[0]) || !PyDict_CheckExact(arguments[1]) || !PyList_CheckExact(arguments[2]))
        return PyErr_SetString(PyExc_TypeError, "expected two dicts and a list of hashes"), NULL;
    PyObject *blocks = arguments[0], *children = arguments[1], *hashes = arguments[2];
    Py_ssize_t size = PyList_GET_SIZE(hashes);
    uint64_t sum = 0;
    for (Py_ssize_t i = 0; i < size; i++)
        if (add_hash(PyList_GET_ITEM(hashes, i), &sum) < 0) return NULL;
    for (Py_ssize_t i = 0; i < size; i++) {
        int hung = PyDict_Contains(children, PyList_GET_ITEM(hashes, i));
        if (hung < 0) return NULL;
        if (hung) return Py_NewRef(Py_None);
    }
    PyObject *records = PyList_New(size);
    for (Py_ssize_t i = 0; i < size && records != NULL; i++) {
        PyObject *hash = PyList_GET_ITEM(hashes, i), *record = PyDict_GetItemWithError(blocks, hash);
        PyList_SET_ITEM(records, i, Py_NewRef(record == NULL ? Py_None : record));
        if (record == NULL ? PyErr_Occurred() != NULL : PyDict_DelItem(blocks, hash) < 0) Py_CLEAR(records);
    }
    return records == NULL ? NULL : Py_BuildValue("KN", (unsigned long long)sum, records);
}

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
    (void)module;
    for (int i = 0; i < FIELDS; i++) {
        if (interned[i] == NULL) interned[i] = PyUnicode_InternFromString(names[i]);
        if (interned[i] == NULL) return -1;
    }
    for (int i = 0; i < PLACE; i++) {
        if (place_interned[i] == NULL) place_interned[i] = PyUnicode_InternFromString(place_names[i]);
        if (place_interned[i] == NULL) return -1;
    }
    return 0;
}

static PyMethodDef methods[] = {
    {"frame_stored", (PyCFunction)(void (*)(void))frame_stored, METH_FASTCALL, NULL},
    {"join_removals", (PyCFunction)(void (*)(void))join_removals, METH_FASTCALL, NULL},
    {"drop_leaves", (PyCFunction)(void (*)(void))drop_leaves, METH_FASTCALL, NULL},
    {"wake", wake, METH_O, NULL},
    {"hold", (PyCFunction)(void (*)(void))hold, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill_module}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_events", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__events(void) { return PyModuleDef_Init(&definition); }
