/* The steps of publishing that touch every block and every token: a table of blocks, and an express lane through the published state
 * for batches in which nothing is unusual. Optional: where this was not compiled, `kvtier.events.publish` does the same in Python;
 * what is promised is written in `hot.py` there, and tests/unit/test_events_hot.py holds the two against each other.
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

#include "_blocks.h"
#include "_message.h"

/* -- msgpack --------------------------------------------------------------------------------------------------------------- */

enum { MOST_INT = 9, MOST_HEAD = 5 };

static inline uint8_t *put(uint8_t *out, uint8_t tag, uint64_t value, int size) {
    *out++ = tag;
    while (size--) *out++ = (uint8_t)(value >> 8 * size);
    return out;
}

/* Write an int; up to 7 bytes behind it are overwritten. Tokens have random lengths, which a branch cannot foresee: so none. */
static inline uint8_t *put_uint32(uint8_t *out, uint32_t value) {
    static const struct {
        uint64_t tag;
        uint8_t shift, size;
    } forms[32] = { /* by the highest bit that is set */
        [0 ... 6] = {0, 56, 1}, [7] = {0xccull << 56, 48, 2}, [8 ... 15] = {0xcdull << 56, 40, 3}, [16 ... 31] = {0xceull << 56, 24, 5}};
    unsigned highest = 31 ^ (unsigned)__builtin_clz(value | 1);
    uint64_t word = htobe64(forms[highest].tag | (uint64_t)value << forms[highest].shift);
    memcpy(out, &word, 8);
    return out + forms[highest].size;
}

static inline uint8_t *put_uint(uint8_t *out, uint64_t value) {
    if (value <= UINT32_MAX) return put_uint32(out, (uint32_t)value);
    value = htobe64(value);
    *out = 0xcf;
    memcpy(out + 1, &value, 8);
    return out + 9;
}

static inline uint8_t *put_text(uint8_t *out, const char *text, size_t size) {
    if (size < 32) *out++ = (uint8_t)(0xa0 | size);
    else if (size <= 0xff) out = put(out, 0xd9, size, 1);
    else if (size <= 0xffff) out = put(out, 0xda, size, 2);
    else out = put(out, 0xdb, size, 4);
    memcpy(out, text, size);
    return out + size;
}

static inline uint8_t *put_length(uint8_t *out, Py_ssize_t count) {
    if (count < 16) return put(out, (uint8_t)(0x90 | count), 0, 0);
    return count <= 0xffff ? put(out, 0xdc, (uint64_t)count, 2) : put(out, 0xdd, (uint64_t)count, 4);
}

/* Write a list of ints; NULL if it is something else. There is room for it. */
static uint8_t *put_uints(uint8_t *out, PyObject *list) {
    Py_ssize_t count = PyList_GET_SIZE(list);
    out = put_length(out, count);
    for (PyObject **item = ((PyListObject *)list)->ob_item, **end = item + count; item < end; item++) {
        uint64_t value;
        if (is_token(*item)) out = put_uint32(out, token_of(*item));
        else if (read_uint(*item, &value)) out = put_uint(out, value);
        else return NULL;
    }
    return out;
}

/* -- events ------------------------------------------------------------------------------------------------------------------ */

/* A kind of event. `at` says where the fields are in instances of `type`, the class that was met last; ours, or an engine's own. */
enum { MOST_FIELDS = 14, HASHES = 0, PARENT = 1, PLACE = 1 };
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
static Kind *const stored = &kinds[0], *const removed = &kinds[1];

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
    if (PyList_CheckExact(value)) return i < kind->hashes ? 0 : MOST_HEAD + MOST_INT * (size_t)PyList_GET_SIZE(value);
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

/* Write an event with these hashes for its own at the end of a message; return its end, NULL if it is left to Python. Nobody else runs, so
 * it stays as it is. */
static uint8_t *put_event(Message *message, const Kind *kind, PyObject *event, const uint64_t *hashes, Py_ssize_t size) {
    size_t room = 128 + MOST_INT * (size_t)size;
    int count = 2;
    for (int i = HASHES + 1; i < kind->fields; i++) {
        PyObject *value = field_of(kind, event, i);
        size_t needed = room_for(kind, i, value);
        if (needed == 0) return NULL;
        room += needed + 32; /* the longest name has 28 letters */
        count += i < kind->required || value != Py_None;
    }
    if (make_space(message, message->size + room) < 0) return NULL;
    uint8_t *out = put(events_of(message) + message->size, (uint8_t)(0x80 | count), 0, 0);
    out = put_text(put_text(out, "type", 4), kind->name, strlen(kind->name));
    out = put_length(put_text(out, kind->names[HASHES], strlen(kind->names[HASHES])), size);
    for (Py_ssize_t i = 0; i < size; i++) out = put_uint(out, hashes[i]);
    for (int i = HASHES + 1; i < kind->fields && out != NULL; i++) {
        PyObject *value = field_of(kind, event, i);
        if (i < kind->required || value != Py_None) out = put_value(put_text(out, kind->names[i], strlen(kind->names[i])), value);
    }
    return out;
}

/* Read an int that `put_uint` wrote, or could have; NULL if it is something else or does not end. */
static const uint8_t *get_uint(const uint8_t *in, const uint8_t *end, uint64_t *value) {
    if (in == end || (*in > 0x7f && (*in < 0xcc || *in > 0xcf))) return NULL;
    int size = *in > 0x7f ? 1 << (*in - 0xcc) : 0;
    *value = *in++;
    if (end - in < size) return NULL;
    for (int i = 0; i < size; i++) *value = i == 0 ? *in++ : *value << 8 | *in++;
    return in;
}

/* Return the hashes of a store, which are what it begins with; `None` if it was not written here. */
static PyObject *read_hashes_of(const uint8_t *in, const uint8_t *end) {
    static const char opening[] = "\xa4type\xab" "BlockStored\xac" "block_hashes";
    enum { OPENING = sizeof opening };
    if (end - in < OPENING + 5) Py_RETURN_NONE;
    if (memcmp(in + 1, opening, OPENING - 1) != 0) Py_RETURN_NONE;
    in += OPENING;
    Py_ssize_t count = *in >> 4 == 9 ? *in & 15 : *in == 0xdc ? in[1] << 8 | in[2] : -1;
    in += *in == 0xdc ? 3 : 1;
    PyObject *hashes = count < 0 ? Py_NewRef(Py_None) : PyList_New(count);
    for (Py_ssize_t i = 0; i < count && hashes != NULL; i++) {
        uint64_t value;
        in = get_uint(in, end, &value);
        if (in == NULL) return Py_DECREF(hashes), Py_NewRef(Py_None);
        PyObject *hash = PyLong_FromUnsignedLongLong(value);
        if (hash == NULL) Py_CLEAR(hashes);
        else PyList_SET_ITEM(hashes, i, hash);
    }
    return hashes;
}

static PyObject *read_stored(PyObject *module, PyObject *data) {
    (void)module;
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) return PyErr_Clear(), Py_NewRef(Py_None);
    PyObject *hashes = read_hashes_of(view.buf, (uint8_t *)view.buf + view.len);
    PyBuffer_Release(&view);
    return hashes;
}

/* -- the express lane ---------------------------------------------------------------------------------------------------------- */

/* Attributes that are used here: of a state, those that it never replaces first; of a holding; of a record; of a batch; of a queue. */
enum { RECORDS, FREE, BY_EVENT, GHOSTS, RECORD, KEPT, CHILDREN = KEPT, BLOCKS, DIGEST, COUNTS, PLACE_OF, WEIGHT, USES, PARENT_OF, NUMBER,
       TS, EVENTS, RANK, POPLEFT, NAMES };
static const char *const texts[NAMES] = {"_records", "_free", "_by_event", "_ghosts", "make_record", "_children", "blocks",
                                         "digest", "counts", "place", "weight", "uses", "parent", "number",
                                         "ts", "events", "data_parallel_rank", "popleft"};
static PyObject *names[NAMES];

/* An event that was read and written: a store, or removals in a row. What it refers to is its own. */
typedef struct {
    PyObject *event, *holding;
    size_t start, stop;             /* where its bytes are in the message */
    Py_ssize_t first, size, joined; /* where its hashes are; of how many events it is made */
    int is_store;
} Draft;

/* The lane that leads to a state. `kept` is what the state keeps for good. */
typedef struct {
    PyObject_HEAD
    PyObject *state, *kept[KEPT];
    Room hashes, numbers, drafts;
    Message *message; /* borrowed for a call, as are the children and the sums, which it then adds to the state's */
    Blocks *children;
    uint64_t blocks, digest;
} Express;

/* Return an attribute that its owner keeps; NULL with an exception set. */
static PyObject *borrow(PyObject *owner, int name) {
    PyObject *value = PyObject_GetAttr(owner, names[name]);
    Py_XDECREF(value);
    return value;
}

/* Add to an int attribute, modulo 2^64. */
static int add_to(PyObject *owner, int name, uint64_t more) {
    PyObject *before = PyObject_GetAttr(owner, names[name]);
    uint64_t sum = before == NULL ? 0 : more + PyLong_AsUnsignedLongLongMask(before);
    PyObject *after = before == NULL || PyErr_Occurred() ? NULL : PyLong_FromUnsignedLongLong(sum);
    int status = after == NULL ? -1 : PyObject_SetAttr(owner, names[name], after);
    Py_XDECREF(before);
    Py_XDECREF(after);
    return status;
}

/* Say whether one of the hashes is in a dict: 1, 0, or -1 with an exception set. */
static int is_any_in(PyObject *dict, const uint64_t *hashes, Py_ssize_t size) {
    int found = 0;
    if (PyDict_GET_SIZE(dict) == 0) return 0;
    for (Py_ssize_t i = 0; i < size && found == 0; i++) {
        PyObject *hash = PyLong_FromUnsignedLongLong(hashes[i]);
        found = hash == NULL ? -1 : PyDict_Contains(dict, hash);
        Py_XDECREF(hash);
    }
    return found;
}

/* -- drafts -- */

/* Say whether two removals are from one place. */
static int is_same_place(PyObject *one, PyObject *other) {
    for (int i = PLACE; i < removed->fields; i++) {
        PyObject *mine = field_of(removed, one, i), *its = field_of(removed, other, i);
        if (mine == its) continue;
        if (mine == NULL || its == NULL || Py_TYPE(mine) != Py_TYPE(its)) return 0;
        if (!PyUnicode_CheckExact(mine) && !PyLong_CheckExact(mine)) return 0; /* comparing would run who knows what */
        if (PyObject_RichCompareBool(mine, its, Py_EQ) != 1) return 0;
    }
    return 1;
}

/* Return the holding of an event's place, borrowed; NULL if there is none yet or it is left to Python, perhaps with an exception set. */
static PyObject *holding_of(const Express *self, PyObject *event) {
    static const int places[][4] = {{5, 8, 12, 11}, {1, 2, 4, 3}}; /* medium, group, ownership, locality */
    const Kind *kind = kind_of(Py_TYPE(event));
    if (kind == NULL) return NULL;
    PyObject *key = PyTuple_New(4), *holding = NULL;
    for (int i = 0; i < 4 && key != NULL; i++) {
        PyObject *value = field_of(kind, event, places[kind - kinds][i]);
        int plain = value != NULL && (value == Py_None || PyUnicode_CheckExact(value) || PyLong_CheckExact(value));
        PyTuple_SET_ITEM(key, i, Py_NewRef(plain ? value : Py_Ellipsis));
    }
    if (key != NULL) holding = PyDict_GetItemWithError(self->kept[BY_EVENT], key);
    Py_XDECREF(key);
    return holding;
}

/* Read a list of hashes behind those that were read, and fetch their slots; -1 if it is something else. */
static Py_ssize_t read_more(Express *self, Blocks *const *tables, Py_ssize_t count, PyObject *list) {
    if (list == NULL || !PyList_CheckExact(list)) return -1;
    Py_ssize_t stop = count + PyList_GET_SIZE(list);
    if (make_room(&self->hashes, (size_t)stop * sizeof(uint64_t)) < 0) return -1;
    uint64_t *hashes = self->hashes.at;
    for (PyObject **item = ((PyListObject *)list)->ob_item; count < stop; item++, count++) {
        if (!read_uint(*item, &hashes[count])) return -1;
        if (tables[0] != NULL) fetch(tables[0], hashes[count]);
        if (tables[1] != NULL) fetch(tables[1], hashes[count]);
    }
    return stop;
}

/* Make a draft of the event at `place`, and of those behind it that are removals from the same place; return where they end, -1 if one
 * is left to Python. `first` says how many hashes were read before. */
static Py_ssize_t draft_one(Express *self, PyObject *events, Py_ssize_t place, Py_ssize_t first, Draft *draft) {
    PyObject *event = Py_NewRef(PyList_GET_ITEM(events, place)), *holding = holding_of(self, event);
    *draft = (Draft){.event = event, .holding = Py_XNewRef(holding), .first = first};
    PyObject *table = holding == NULL ? NULL : borrow(holding, BLOCKS);
    const Kind *kind = table == NULL ? NULL : kind_of(Py_TYPE(event)); /* from here on nothing runs that could change it */
    if (kind == NULL) return -1;
    Blocks *blocks = Py_IS_TYPE(table, blocks_type) ? (Blocks *)table : NULL, *tables[] = {blocks, kind == removed ? self->children : NULL};
    Py_ssize_t stop = place, end = first;
    do {
        end = read_more(self, tables, end, field_of(kind, PyList_GET_ITEM(events, stop), HASHES));
        if (end < 0) return -1;
        stop++;
    } while (kind == removed && stop < PyList_GET_SIZE(events) && Py_IS_TYPE(PyList_GET_ITEM(events, stop), removed->type) &&
             is_same_place(event, PyList_GET_ITEM(events, stop)));
    draft->is_store = kind == stored;
    draft->size = end - first;
    draft->joined = stop - place;
    Message *message = self->message;
    const uint8_t *written = put_event(message, kind, event, (uint64_t *)self->hashes.at + first, draft->size);
    if (written == NULL) return -1;
    draft->start = message->size;
    if (draft->size > 0) message->size = (size_t)(written - events_of(message));
    draft->stop = message->size;
    return stop;
}

/* Make drafts of all events; return how many, and whether that was possible. */
static Py_ssize_t draft_all(Express *self, PyObject *events, int *plain) {
    Py_ssize_t count = 0, place = 0, first = 0;
    while (place >= 0 && place < PyList_GET_SIZE(events)) {
        if (make_room(&self->drafts, (size_t)(count + 1) * sizeof(Draft)) < 0) break;
        Draft *draft = (Draft *)self->drafts.at + count++;
        place = draft_one(self, events, place, first, draft);
        first = draft->first + draft->size;
    }
    *plain = place >= PyList_GET_SIZE(events);
    return count;
}

/* -- stores -- */

static PyObject *make_record(const Express *self, const Draft *draft, PyObject *number) {
    const Kind *kind = kind_of(Py_TYPE(draft->event));
    PyObject *place = borrow(draft->holding, PLACE_OF), *uses = PyLong_FromSsize_t(draft->size);
    PyObject *record = NULL, *data = make_piece(self->message, draft->start, draft->stop - draft->start);
    if (kind != NULL && place != NULL && uses != NULL && data != NULL) {
        PyObject *arguments[] = {number, place, data, field_of(kind, draft->event, PARENT), uses, uses};
        record = PyObject_Vectorcall(self->kept[RECORD], arguments, Py_ARRAY_LENGTH(arguments), NULL);
    }
    Py_XDECREF(uses);
    Py_XDECREF(data);
    return record;
}

/* Hold the blocks of a store and keep its record under a number: 1, 0 if it is left to Python, -1 with an exception set. */
static int store_as(Express *self, const Draft *draft, PyObject *number) {
    const uint64_t *hashes = (uint64_t *)self->hashes.at + draft->first;
    Blocks *blocks = (Blocks *)borrow(draft->holding, BLOCKS);
    PyObject *weight = borrow(draft->holding, WEIGHT), *record = make_record(self, draft, number);
    PyObject *parent = record == NULL ? NULL : borrow(record, PARENT_OF);
    uint64_t sum = 0, parent_hash, factor = 0;
    uint32_t count = (uint32_t)PyLong_AsUnsignedLong(number);
    int status = parent == NULL || weight == NULL || !read_uint(weight, &factor) ? -1 : hold_all(blocks, hashes, draft->size, count, &sum);
    if (status == 1) {
        int has_parent = read_uint(parent, &parent_hash);
        status = has_parent && set_number(self->children, parent_hash, number_of(self->children, parent_hash) + 1) < 0 ? -1 : 1;
        if (status == 1 && PyDict_SetItem(self->kept[RECORDS], number, record) < 0) status = -1;
        self->blocks += (uint64_t)draft->size;
        self->digest += sum * factor;
    }
    Py_XDECREF(record);
    return status;
}

static int store(Express *self, const Draft *draft) {
    PyObject *free = self->kept[FREE];
    Py_ssize_t spare = PyList_GET_SIZE(free);
    int ghosts = is_any_in(self->kept[GHOSTS], (uint64_t *)self->hashes.at + draft->first, draft->size);
    if (ghosts != 0) return ghosts < 0 ? -1 : 0;
    PyObject *number = spare ? Py_NewRef(PyList_GET_ITEM(free, spare - 1)) : PyLong_FromSsize_t(PyDict_GET_SIZE(self->kept[RECORDS]) + 1);
    int status = number == NULL ? -1 : store_as(self, draft, number);
    Py_XDECREF(number);
    return status == 1 && spare ? PyList_SetSlice(free, spare - 1, spare, NULL) < 0 ? -1 : 1 : status;
}

/* -- removals -- */

static PyObject *record_of(const Express *self, uint32_t number) {
    PyObject *key = PyLong_FromUnsignedLong(number);
    PyObject *record = key == NULL ? NULL : PyDict_GetItemWithError(self->kept[RECORDS], key);
    Py_XDECREF(key);
    return record;
}

/* Say whether a record that loses so many uses leaves, and so the parent that it names has a child less. */
static int frees_parent(const Express *self, uint32_t number, Py_ssize_t times, uint64_t *parent) {
    PyObject *record = times == 0 ? NULL : record_of(self, number);
    PyObject *uses = record == NULL ? NULL : borrow(record, USES), *named = uses == NULL ? NULL : borrow(record, PARENT_OF);
    return named != NULL && PyLong_AsSsize_t(uses) == times && read_uint(named, parent);
}

/* Take hashes out and note their numbers; return how many: all, or as far as each is held and has no children. A prompt is removed
 * from its end, so that often the last child goes right before its parent. */
static Py_ssize_t drop_some(Express *self, Blocks *blocks, const uint64_t *hashes, Py_ssize_t size, uint32_t *numbers) {
    Py_ssize_t done = 0, times = 0;
    uint64_t freed = 0;
    int frees = 0;
    for (; done < size; done++, times++) {
        Part *part = part_of(blocks, hashes[done]);
        unsigned place;
        Bucket *bucket = find_in(part, hashes[done], &place);
        if (bucket == NULL) break;
        numbers[done] = bucket->numbers[place];
        if (done && numbers[done] != numbers[done - 1]) {
            frees = frees_parent(self, numbers[done - 1], times, &freed);
            times = 0;
        }
        uint32_t children = number_of(self->children, hashes[done]);
        if (children > (uint32_t)(frees && freed == hashes[done])) break;
        empty(part, bucket, place);
    }
    return done;
}

/* Forget a record; return another that this leaves without uses: the ghost of its parent, if it was that one's last child. */
static PyObject *forget(Express *self, PyObject *record, PyObject *number) {
    PyObject *parent = PyObject_GetAttr(record, names[PARENT_OF]), *ghost = NULL;
    uint64_t hash;
    int status = parent == NULL || PyList_Append(self->kept[FREE], number) < 0 ? -1 : PyDict_DelItem(self->kept[RECORDS], number);
    if (status == 0 && read_uint(parent, &hash)) {
        uint32_t children = number_of(self->children, hash);
        if (children > 1) set_number(self->children, hash, children - 1);
        else take_out(self->children, hash);
        if (children <= 1) ghost = Py_XNewRef(PyDict_GetItemWithError(self->kept[GHOSTS], parent));
        if (ghost != NULL && PyDict_DelItem(self->kept[GHOSTS], parent) < 0) Py_CLEAR(ghost);
    }
    Py_XDECREF(parent);
    return ghost;
}

/* Take uses from a record; with its last use it lets its parent go, and so on up; -1 with an exception set. */
static int unuse(Express *self, uint32_t number, Py_ssize_t times) {
    PyObject *record = Py_XNewRef(record_of(self, number));
    while (record != NULL) {
        PyObject *uses = borrow(record, USES), *left = uses == NULL ? NULL : PyLong_FromSsize_t(PyLong_AsSsize_t(uses) - times);
        PyObject *key = left == NULL || PyObject_SetAttr(record, names[USES], left) < 0 ? NULL : PyObject_GetAttr(record, names[NUMBER]);
        PyObject *next = key == NULL || PyObject_IsTrue(left) ? NULL : forget(self, record, key);
        Py_XDECREF(left);
        Py_XDECREF(key);
        Py_SETREF(record, next);
        times = 1;
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Let the blocks of a removal go: 1, 0 if it is left to Python, -1 with an exception set. */
static int let_go(Express *self, const Draft *draft) {
    const uint64_t *hashes = (uint64_t *)self->hashes.at + draft->first;
    PyObject *counts = borrow(draft->holding, COUNTS), *weight = borrow(draft->holding, WEIGHT);
    Blocks *blocks = (Blocks *)borrow(draft->holding, BLOCKS);
    if (counts == NULL || weight == NULL || make_room(&self->numbers, (size_t)draft->size * sizeof(uint32_t)) < 0) return -1;
    uint32_t *numbers = self->numbers.at;
    int counted = is_any_in(counts, hashes, draft->size);
    if (counted != 0) return counted < 0 ? -1 : 0;
    Py_ssize_t done = drop_some(self, blocks, hashes, draft->size, numbers);
    if (done < draft->size) {
        while (done--) set_number(blocks, hashes[done], numbers[done]); /* there is room: it was there */
        return PyErr_Occurred() ? -1 : 0;
    }
    uint64_t sum = 0, factor = 0;
    Py_ssize_t times = 0;
    read_uint(weight, &factor);
    for (Py_ssize_t i = 0; i < draft->size; i++) {
        sum += hashes[i];
        times++;
        if (i + 1 < draft->size && numbers[i + 1] == numbers[i]) continue;
        if (unuse(self, numbers[i], times) < 0) return -1;
        times = 0;
    }
    self->blocks -= (uint64_t)draft->size;
    self->digest -= sum * factor;
    return 1;
}

/* -- batches -- */

/* Bring a draft, which is all news then, into the state: 1, 0 if it is left to Python, -1 with an exception set. */
static int apply(Express *self, const Draft *draft) {
    if (draft->size == 0) return 1;
    PyObject *table = borrow(draft->holding, BLOCKS);
    if (table == NULL) return -1;
    if (self->children == NULL || !Py_IS_TYPE(table, blocks_type)) return 0;
    int status = draft->is_store ? store(self, draft) : let_go(self, draft);
    self->message->events += status == 1;
    return status;
}

/* Return a draft as Python has them: the kind's name, the event, its bytes. */
static PyObject *to_python(Express *self, const Draft *draft) {
    const Kind *kind = kind_of(Py_TYPE(draft->event));
    if (kind == NULL) return PyErr_SetString(PyExc_TypeError, "the class of an event was changed"), NULL;
    const char *data = (char *)events_of(self->message) + draft->start;
    Py_ssize_t size = (Py_ssize_t)(draft->stop - draft->start);
    if (draft->joined == 1) return Py_BuildValue("sOy#", kind->name, draft->event, data, size);
    PyObject *fields[MOST_FIELDS] = {PyList_New(draft->size)}, *event = NULL;
    for (Py_ssize_t i = 0; i < draft->size && fields[HASHES] != NULL; i++) {
        PyObject *hash = PyLong_FromUnsignedLongLong(((uint64_t *)self->hashes.at)[draft->first + i]);
        if (hash == NULL) Py_CLEAR(fields[HASHES]);
        else PyList_SET_ITEM(fields[HASHES], i, hash);
    }
    for (int i = PLACE; i < kind->fields; i++) fields[i] = field_of(kind, draft->event, i);
    if (fields[HASHES] != NULL) event = PyObject_Vectorcall((PyObject *)Py_TYPE(draft->event), fields, (size_t)kind->fields, NULL);
    Py_XDECREF(fields[HASHES]);
    return event == NULL ? NULL : Py_BuildValue("sNy#", kind->name, event, data, size);
}

/* Apply drafts up to the first that is left to Python; return that one and those behind it, and take them out of the message. */
static PyObject *apply_all(Express *self, Py_ssize_t count) {
    const Draft *drafts = self->drafts.at;
    Py_ssize_t done = 0;
    int status = 1;
    while (done < count && (status = apply(self, &drafts[done])) == 1) done++;
    PyObject *rest = status < 0 ? NULL : PyList_New(count - done);
    for (Py_ssize_t i = done; i < count && rest != NULL; i++) {
        PyObject *draft = to_python(self, &drafts[i]);
        if (draft == NULL) Py_CLEAR(rest);
        else PyList_SET_ITEM(rest, i - done, draft);
    }
    if (done < count) self->message->size = drafts[done].start;
    return rest;
}

/* Begin a call that adds to a message. */
static int begin(Express *self, PyObject *message) {
    if (!Py_IS_TYPE(message, message_type)) return PyErr_SetString(PyExc_TypeError, "expected a message to add to"), -1;
    self->message = (Message *)message;
    PyObject *children = check_open(self->message) < 0 ? NULL : borrow(self->state, CHILDREN);
    if (children == NULL) return -1;
    self->children = Py_IS_TYPE(children, blocks_type) ? (Blocks *)children : NULL;
    self->blocks = self->digest = 0;
    return 0;
}

/* Tell the state what the call did to its sums, whether it went well or not; return what the call returns. */
static PyObject *finish(Express *self, PyObject *result) {
    PyObject *type, *value, *traceback;
    if (self->blocks == 0 && self->digest == 0) return result;
    PyErr_Fetch(&type, &value, &traceback);
    int status = add_to(self->state, BLOCKS, self->blocks) < 0 ? -1 : add_to(self->state, DIGEST, self->digest);
    if (status == 0) return PyErr_Restore(type, value, traceback), result;
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return Py_XDECREF(result), NULL;
}

/* Take events in; return what is left to Python, or None, and nothing done, if all are. A batch whose events they are leaves its queue
 * before anything is done. */
static PyObject *take_events(Express *self, PyObject *events, PyObject *queue) {
    int plain;
    size_t before = self->message->size;
    Py_ssize_t size = draft_all(self, events, &plain);
    PyObject *rest = NULL, *batch = NULL;
    if (!plain) {
        PyErr_Clear(); /* Python finds the same fault, and says it better */
        self->message->size = before;
        rest = Py_NewRef(Py_None);
    } else if (queue == NULL || (batch = PyObject_CallMethodNoArgs(queue, names[POPLEFT])) != NULL) {
        rest = apply_all(self, size);
    }
    for (const Draft *draft = self->drafts.at; size--; draft++) {
        Py_DECREF(draft->event);
        Py_XDECREF(draft->holding);
    }
    Py_XDECREF(batch);
    return rest;
}

static PyObject *take(Express *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2) return PyErr_SetString(PyExc_TypeError, "expected events and a message"), NULL;
    if (begin(self, arguments[1]) < 0) return NULL;
    return PyList_CheckExact(arguments[0]) ? finish(self, take_events(self, arguments[0], NULL)) : Py_NewRef(Py_None);
}

/* Take the batch in that is the first in a queue, if it is of that rank; return like `take_events`. */
static PyObject *take_batch(Express *self, PyObject *queue, PyObject *batch, uint64_t rank) {
    PyObject *ts = PyObject_GetAttr(batch, names[TS]), *events = ts == NULL ? NULL : PyObject_GetAttr(batch, names[EVENTS]);
    PyObject *of_rank = events == NULL ? NULL : PyObject_GetAttr(batch, names[RANK]), *rest;
    uint64_t its;
    Py_ssize_t before = self->message->events;
    if (of_rank == NULL || !PyFloat_CheckExact(ts) || !PyList_CheckExact(events) || !read_uint(of_rank, &its) || its != rank) {
        PyErr_Clear();
        rest = Py_NewRef(Py_None);
    } else {
        rest = take_events(self, events, queue);
    }
    if (rest != NULL && rest != Py_None) {
        if (PyList_GET_SIZE(rest) > 0 || (self->message->events == before && PyList_GET_SIZE(events) > 0)) {
            Py_SETREF(rest, Py_BuildValue("OnO", ts, before, rest));
        } else {
            self->message->batches++;
            self->message->ts = PyFloat_AS_DOUBLE(ts);
        }
    }
    Py_XDECREF(ts);
    Py_XDECREF(events);
    Py_XDECREF(of_rank);
    return rest;
}

static PyObject *join(Express *self, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t most, most_bytes, rank;
    if (count != 5 || !read_uint(arguments[1], &most) || !read_uint(arguments[2], &most_bytes))
        return PyErr_SetString(PyExc_TypeError, "expected a queue, how many batches and bytes at most, a rank, and a message"), NULL;
    if (begin(self, arguments[4]) < 0) return NULL;
    if (!read_uint(arguments[3], &rank)) Py_RETURN_NONE;
    PyObject *rest = NULL;
    for (; most > 0 && self->message->size < most_bytes; most--) {
        PyObject *batch = PySequence_GetItem(arguments[0], 0);
        Py_XSETREF(rest, batch == NULL ? NULL : take_batch(self, arguments[0], batch, rank));
        Py_XDECREF(batch);
        if (rest == NULL) return finish(self, NULL);
        if (!PyList_CheckExact(rest)) break;
    }
    if (rest == NULL || PyList_CheckExact(rest)) Py_XSETREF(rest, Py_NewRef(Py_None));
    return finish(self, rest);
}

static PyObject *make_express(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *state;
    (void)keywords;
    if (!PyArg_ParseTuple(arguments, "O", &state)) return NULL;
    Express *self = (Express *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->state = Py_NewRef(state);
    for (int i = 0; i < KEPT; i++)
        if ((self->kept[i] = PyObject_GetAttr(state, names[i])) == NULL) return Py_DECREF(self), NULL;
    return (PyObject *)self;
}

static void free_express(Express *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->state);
    for (int i = 0; i < KEPT; i++) Py_XDECREF(self->kept[i]);
    Room *rooms[] = {&self->hashes, &self->numbers, &self->drafts};
    for (size_t i = 0; i < Py_ARRAY_LENGTH(rooms); i++) PyMem_Free(rooms[i]->at);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef express_methods[] = {
    {"take", (PyCFunction)(void (*)(void))take, METH_FASTCALL, NULL},
    {"join", (PyCFunction)(void (*)(void))join, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot express_slots[] = {
    {Py_tp_new, make_express}, {Py_tp_dealloc, free_express}, {Py_tp_methods, express_methods}, {0, NULL}};
static PyType_Spec express_spec = {"kvtier._events.Express", sizeof(Express), 0, Py_TPFLAGS_DEFAULT, express_slots};

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
    for (int i = 0; i < NAMES; i++)
        if (names[i] == NULL && (names[i] = PyUnicode_InternFromString(texts[i])) == NULL) return -1;
    PyType_Spec *specs[] = {&blocks_spec, &message_spec, &piece_spec, &express_spec};
    PyTypeObject **types[] = {&blocks_type, &message_type, &piece_type, NULL};
    for (size_t i = 0; i < Py_ARRAY_LENGTH(specs); i++) {
        PyObject *type = PyType_FromSpec(specs[i]);
        if (type == NULL || PyModule_AddType(module, (PyTypeObject *)type) < 0) return -1;
        if (types[i] != NULL) Py_XSETREF(*types[i], (PyTypeObject *)Py_NewRef(type));
        Py_DECREF(type);
    }
    return 0;
}

static PyMethodDef methods[] = {{"read_stored", read_stored, METH_O, NULL}, {"wake", wake, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill_module}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_events", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__events(void) { return PyModuleDef_Init(&definition); }
