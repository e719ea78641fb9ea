/* `Message`, the bytes of a message, and `Piece`, those of one event in it: part of `_events.c`, which includes it. `hot.py` says what
 * is promised. A message belongs to one thread, like the state that has pieces of it; what all messages share is guarded by the GIL. */
#ifndef KVTIER_MESSAGE_H
#define KVTIER_MESSAGE_H

#include "_blocks.h"
#include "_slabs.h"

#include <structmember.h>

/* -- memory ---------------------------------------------------------------------------------------------------------------- */

/* Where a message is kept: a large one in a stretch, others where the system puts them. */
enum { LARGE = 32 << 10 };

typedef struct {
    uint8_t *at;
    size_t room;
    int is_stretch;
} Memory;

/* Return whether there was some. */
static int get_memory(Memory *memory, size_t size) {
    void *stretch = size >= LARGE && is_stretch(size) ? take_stretch(size) : NULL;
    *memory = stretch != NULL ? (Memory){stretch, (size_t)grains_for(size) * GRAIN, 1} : (Memory){malloc(size ? size : 1), size, 0};
    return memory->at != NULL;
}

static void give_back(const Memory *memory) {
    if (memory->is_stretch) give_stretch(memory->at, memory->room);
    else free(memory->at);
}

/* -- messages ---------------------------------------------------------------------------------------------------------------- */

/* Where a slab has much room, events are written to where a large message stays, and what it does not need goes back when it is sealed.
 * Else they are written elsewhere, and it moves to a place of its size then: so holes are filled that others left. Pieces are in a list,
 * so that they can be moved: of a message that is forgotten, all that is kept is pieces, and never more than twice their size, but for what
 * a stretch rounds up. */
enum { SPACE = 144 << 10, HEAD = 32, TAIL = 32 }; /* what a message begins with, and how much of it is not for events */

typedef struct Piece Piece;
typedef struct {
    PyObject_HEAD
    Memory memory;
    size_t first, head, size, kept; /* where the events begin; bytes in front of them; all bytes; those that are pieces' */
    Py_ssize_t events, batches, views;
    double ts; /* of the last batch */
    Piece *pieces;
    int is_sealed, is_forgotten;
} Message;

struct Piece {
    PyObject_HEAD
    Message *message;
    Piece *next, **link; /* what refers to it */
    size_t start, size;
};

static PyTypeObject *message_type, *piece_type;
static Memory spare; /* what one message wrote to and left, for the next */

static inline uint8_t *events_of(const Message *self) { return self->memory.at + self->first; }

/* Make room for so many bytes of events, and some behind them. */
static int make_space(Message *self, size_t size) {
    size_t needed = HEAD + size + TAIL;
    if (needed <= self->memory.room) return 0;
    Memory grown;
    if (!get_memory(&grown, needed <= SPACE ? SPACE : 2 * needed)) return PyErr_NoMemory(), -1;
    if (self->size > 0) memcpy(grown.at + HEAD, events_of(self), self->size);
    give_back(&self->memory);
    self->memory = grown;
    return 0;
}

static int begin_message(Message *self) {
    self->first = HEAD;
    if (spare.is_stretch || (spare.at != NULL && !has_stretch(SPACE))) {
        self->memory = spare;
        spare = (Memory){0};
    } else if (!has_stretch(SPACE)) {
        self->memory = (Memory){malloc(SPACE), SPACE, 0};
        if (self->memory.at == NULL) return PyErr_NoMemory(), -1;
    }
    return make_space(self, 0);
}

static void leave_to_next(const Memory *memory) {
    if (spare.at == NULL && memory->room <= SPACE) spare = *memory;
    else give_back(memory);
}

/* Where less than half of a forgotten message is pieces, keep just those. Without memory for that, or while somebody reads, it stays. */
static void shrink(Message *self) {
    Memory small;
    if (!self->is_forgotten || self->views || 2 * self->kept >= self->size || !get_memory(&small, self->kept)) return;
    size_t start = 0;
    for (Piece *piece = self->pieces; piece != NULL; piece = piece->next) {
        memcpy(small.at + start, events_of(self) + piece->start, piece->size);
        piece->start = start;
        start += piece->size;
    }
    give_back(&self->memory);
    self->memory = small;
    self->first = self->head = 0;
    self->size = self->kept;
}

static PyObject *make_piece(Message *message, size_t start, size_t size) {
    Piece *self = (Piece *)piece_type->tp_alloc(piece_type, 0);
    if (self == NULL) return NULL;
    self->message = (Message *)Py_NewRef((PyObject *)message);
    self->start = start;
    self->size = size;
    self->next = message->pieces;
    self->link = &message->pieces;
    if (self->next != NULL) self->next->link = &self->next;
    message->pieces = self;
    message->kept += size;
    return (PyObject *)self;
}

static void free_piece(Piece *self) {
    PyTypeObject *type = Py_TYPE(self);
    Message *message = self->message;
    *self->link = self->next;
    if (self->next != NULL) self->next->link = self->link;
    message->kept -= self->size;
    shrink(message);
    Py_DECREF(message);
    type->tp_free(self);
    Py_DECREF(type);
}

static int view_piece(Piece *self, Py_buffer *view, int flags) {
    int status = PyBuffer_FillInfo(view, (PyObject *)self, events_of(self->message) + self->start, (Py_ssize_t)self->size, 1, flags);
    if (status == 0) self->message->views++;
    return status;
}

static void end_view_of_piece(Piece *self, Py_buffer *view) {
    (void)view;
    self->message->views--;
    shrink(self->message);
}

static Py_ssize_t piece_length(Piece *self) { return (Py_ssize_t)self->size; }

static PyObject *make_message(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    (void)keywords;
    if (PyTuple_GET_SIZE(arguments) != 0) return PyErr_SetString(PyExc_TypeError, "Message() takes no arguments"), NULL;
    Message *self = (Message *)type->tp_alloc(type, 0);
    if (self == NULL || begin_message(self) < 0) return Py_XDECREF(self), NULL;
    return (PyObject *)self;
}

static void free_message(Message *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (self->is_sealed) give_back(&self->memory);
    else leave_to_next(&self->memory);
    type->tp_free(self);
    Py_DECREF(type);
}

/* Refuse what would change a message that others rely on. */
static int check_open(const Message *self) {
    if (!self->is_sealed && self->views == 0) return 0;
    PyErr_SetString(PyExc_ValueError, self->is_sealed ? "the message is sealed" : "somebody reads the message");
    return -1;
}

static PyObject *append_event(Message *self, PyObject *data) {
    if (!PyBytes_Check(data)) return PyErr_Format(PyExc_TypeError, "expected an event's bytes, not %.100R", data), NULL;
    size_t size = (size_t)PyBytes_GET_SIZE(data);
    if (check_open(self) < 0 || make_space(self, self->size + size) < 0) return NULL;
    memcpy(events_of(self) + self->size, PyBytes_AS_STRING(data), size);
    self->size += size;
    self->events++;
    Py_RETURN_NONE;
}

static PyObject *seal(Message *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2 || !PyBytes_Check(arguments[0]) || !PyBytes_Check(arguments[1]))
        return PyErr_SetString(PyExc_TypeError, "expected bytes to be put in front, and bytes to be put behind"), NULL;
    size_t head = (size_t)PyBytes_GET_SIZE(arguments[0]), tail = (size_t)PyBytes_GET_SIZE(arguments[1]);
    if (check_open(self) < 0) return NULL;
    size_t end = self->first + self->size + tail, used = (size_t)grains_for(end) * GRAIN;
    if (self->memory.is_stretch && self->size >= LARGE && head <= self->first && end <= self->memory.room) {
        if (used < self->memory.room) give_stretch(self->memory.at + used, self->memory.room - used);
        self->memory.room = used;
    } else {
        Memory moved;
        if (!get_memory(&moved, head + self->size + tail)) return PyErr_NoMemory();
        memcpy(moved.at + head, events_of(self), self->size);
        leave_to_next(&self->memory);
        self->memory = moved;
        self->first = head;
    }
    memcpy(events_of(self) - head, PyBytes_AS_STRING(arguments[0]), head);
    memcpy(events_of(self) + self->size, PyBytes_AS_STRING(arguments[1]), tail);
    self->head = head;
    self->size += head + tail;
    self->is_sealed = 1;
    Py_RETURN_NONE;
}

static PyObject *forget_message(Message *self, PyObject *unused) {
    (void)unused;
    if (!self->is_sealed) return PyErr_SetString(PyExc_ValueError, "the message is not sealed yet"), NULL;
    self->is_forgotten = 1;
    shrink(self);
    Py_RETURN_NONE;
}

static PyObject *payload(Message *self, PyObject *unused) {
    (void)unused;
    return PyMemoryView_FromObject((PyObject *)self);
}

static PyObject *size_of(Message *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromSize_t(sizeof *self + self->memory.room);
}

static int view_message(Message *self, Py_buffer *view, int flags) {
    int status = PyBuffer_FillInfo(view, (PyObject *)self, events_of(self) - self->head, (Py_ssize_t)self->size, 1, flags);
    if (status == 0) self->views++;
    return status;
}

static void end_view(Message *self, Py_buffer *view) {
    (void)view;
    self->views--;
    shrink(self);
}

static Py_ssize_t message_length(Message *self) { return (Py_ssize_t)self->size; }

static PyMethodDef message_methods[] = {
    {"append", (PyCFunction)append_event, METH_O, NULL},
    {"seal", (PyCFunction)(void (*)(void))seal, METH_FASTCALL, NULL},
    {"payload", (PyCFunction)payload, METH_NOARGS, NULL},
    {"forget", (PyCFunction)forget_message, METH_NOARGS, NULL},
    {"__sizeof__", (PyCFunction)size_of, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef message_members[] = {
    {"events", T_PYSSIZET, offsetof(Message, events), READONLY, NULL}, {"batches", T_PYSSIZET, offsetof(Message, batches), 0, NULL},
    {"ts", T_DOUBLE, offsetof(Message, ts), 0, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot message_slots[] = {
    {Py_tp_new, make_message}, {Py_tp_dealloc, free_message}, {Py_tp_methods, message_methods}, {Py_tp_members, message_members},
    {Py_bf_getbuffer, view_message}, {Py_bf_releasebuffer, end_view}, {Py_sq_length, message_length}, {0, NULL}};
static PyType_Spec message_spec = {"kvtier._events.Message", sizeof(Message), 0, Py_TPFLAGS_DEFAULT, message_slots};

static PyMemberDef piece_members[] = {{"message", T_OBJECT_EX, offsetof(Piece, message), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot piece_slots[] = {
    {Py_tp_dealloc, free_piece}, {Py_tp_members, piece_members}, {Py_bf_getbuffer, view_piece}, {Py_bf_releasebuffer, end_view_of_piece},
    {Py_sq_length, piece_length}, {0, NULL}};
static PyType_Spec piece_spec = {"kvtier._events.Piece", sizeof(Piece), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, piece_slots};

#endif
