/* The commands to CUDA streams for a piece, submitted in one call: `PythonSubmitter` of
 * `kvtier.transfer.cuda.commands`, with next to no time between the calls of the driver. This module is
 * optional: where it was not compiled, that class does the same. Its docstrings say what each method
 * promises. tests/unit/test_cuda_commands.py compares the two, call by call.
 *
 * This needs no header and no library of CUDA: it is given the addresses of the driver's functions. Streams,
 * events and device memory are numbers; 0 stands for no event. Calls that only enqueue keep the GIL: they
 * are short, and retaking it from a busy thread may take longer than the bus has work for. A failed call is
 * reported by the function `fail` that `Submitter` was made with.
 */
#define Py_LIMITED_API 0x030B0000 /* one binary for every Python from 3.11 on */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { NOT_READY = 600, NULL_BLOCK = 0 };

typedef uint64_t Handle; /* a stream, an event, or an address */

/* `CUmemcpyAttributes`: one rule for all ranges of a batch, in stream order, without location hints. */
typedef struct {
    int src_access_order, src_location[2], dst_location[2];
    unsigned flags;
} BatchAttributes;

/* The driver's functions, in the order of `driver.SUBMIT_FUNCTIONS`. Older drivers lack `copy_batch`. */
typedef struct {
    int (*launch)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle,
                  void **, void **);
    int (*copy)(Handle, Handle, size_t, Handle);
    int (*copy_batch)(Handle *, Handle *, size_t *, size_t, BatchAttributes *, size_t *, size_t, size_t *,
                      Handle);
    int (*record)(Handle, Handle);
    int (*wait_for)(Handle, Handle, unsigned);
    int (*query_event)(Handle);
    int (*query_stream)(Handle);
    int (*wait_over)(Handle);
    int (*elapsed)(float *, Handle, Handle);
} Driver;

typedef struct {
    PyObject_HEAD
    Driver driver;
    PyObject *fail;
    int64_t to_pool, address, seam, small_range, first_ranges, batch_ranges;
} Submitter;

/* `driver.Launch`, `commands.KernelArgs` and `commands.SimpleBounds`, and the columns of `pieces.Pages`. */
typedef struct { int64_t function, threads, shared_bytes, programs, tiles, table, num_tiles; } Launch;
typedef struct { int64_t host, device, stream, copied, max_blocks; } KernelArgs;
typedef struct { int64_t first, stride, num_blocks, num_slots; } SimpleBounds;
enum { BASE, STRIDE, SIZE, OFFSET, NUM_COLUMNS };

/* -- arguments ------------------------------------------------------------------------------------------ */

static PyObject *refuse(const char *expected) {
    PyErr_Format(PyExc_ValueError, "expected %s", expected);
    return NULL;
}

static int read_integers(PyObject *const *objects, int count, int64_t *integers) {
    for (int i = 0; i < count; i++) {
        integers[i] = PyLong_AsLongLong(objects[i]);
        if (integers[i] == -1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

static int expect_count(Py_ssize_t given, Py_ssize_t expected) {
    if (given == expected) return 0;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments or items, got %zd", expected, given);
    return -1;
}

static int expect_tuple(PyObject *tuple, Py_ssize_t count) {
    return expect_count(PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1, count);
}

static int read_tuple(PyObject *tuple, int count, int64_t *integers) {
    if (expect_tuple(tuple, count) < 0) return -1;
    for (int i = 0; i < count; i++) {
        PyObject *item = PyTuple_GetItem(tuple, i);
        if (read_integers(&item, 1, &integers[i]) < 0) return -1;
    }
    return 0;
}

/* Read a range of a job's blocks, `[span[0], span[1])`. */
static int read_span(PyObject *const *objects, int64_t *span) {
    if (read_integers(objects, 2, span) < 0) return -1;
    return 0 <= span[0] && span[0] <= span[1] ? 0 : (refuse("a first block, and a last one behind it"), -1);
}

typedef struct {
    Py_buffer view;
    Py_ssize_t count; /* 0 if the object is None */
} Array;

static int64_t get(const Array *array, Py_ssize_t i) {
    return *(int64_t *)((char *)array->view.buf + i * array->view.strides[0]);
}

/* Borrow an array of int64 with at least `least` items. If it is `optional`, it may be None. */
static int borrow(PyObject *object, Py_ssize_t least, int optional, Array *array) {
    array->view.obj = NULL;
    array->count = 0;
    if (object == Py_None && optional) return 0;
    if (PyObject_GetBuffer(object, &array->view, PyBUF_STRIDED_RO) < 0) return -1;
    array->count = array->view.ndim == 1 && array->view.itemsize == 8 ? array->view.shape[0] : -1;
    if (array->count >= least) return 0;
    PyBuffer_Release(&array->view);
    refuse("an array of one dimension, with an int64 for each block or each page");
    return -1;
}

static void give_back(Array *array) { PyBuffer_Release(&array->view); }

/* `pieces.Rows`: the addresses of a job's blocks. */
typedef struct {
    Array ids;
    int64_t base, stride;
} Rows;

static int borrow_rows(PyObject *tuple, int64_t last, Rows *rows) {
    if (expect_tuple(tuple, 3) < 0) return -1;
    PyObject *numbers[] = {PyTuple_GetItem(tuple, 1), PyTuple_GetItem(tuple, 2)};
    if (read_integers(numbers, 1, &rows->base) < 0 || read_integers(numbers + 1, 1, &rows->stride) < 0)
        return -1;
    return borrow(PyTuple_GetItem(tuple, 0), last, 1, &rows->ids);
}

static int64_t address_of(const Rows *rows, int64_t first, int64_t i) {
    return rows->base + rows->stride * (rows->ids.count ? get(&rows->ids, first + i) : i);
}

/* Return None, or let `fail` raise. */
static PyObject *report(Submitter *self, int status, const char *what) {
    if (status == 0) Py_RETURN_NONE;
    PyObject *result = PyObject_CallFunction(self->fail, "is", status, what);
    if (result != NULL) PyErr_SetString(PyExc_RuntimeError, "expected a failed call to raise");
    Py_XDECREF(result);
    return NULL;
}

/* -- a kernel ------------------------------------------------------------------------------------------- */

static void write_to_host(const KernelArgs *args, const Array *blocks, const Rows *rows,
                          const int64_t *span) {
    int64_t *written = (int64_t *)args->host, count = span[1] - span[0];
    for (int64_t i = 0; i < count; i++) {
        written[i] = get(blocks, span[0] + i);
        written[count + i] = address_of(rows, span[0], i);
    }
}

static int copy_to_device(const Driver *driver, const KernelArgs *args, int64_t count) {
    size_t size = 2 * sizeof(int64_t) * count;
    int status = args->device ? driver->copy(args->device, args->host, size, args->stream) : 0;
    return status || !args->device ? status : driver->record(args->copied, args->stream);
}

/* write_args(args, blocks, first, last, rows, offset) */
static PyObject *submitter_write_args(Submitter *self, PyObject *const *args, Py_ssize_t given) {
    KernelArgs kernel_args;
    Rows rows;
    Array blocks;
    int64_t span[2], offset;
    if (expect_count(given, 6) < 0 || read_tuple(args[0], 5, &kernel_args.host) < 0 ||
        read_span(args + 2, span) < 0)
        return NULL;
    if (span[1] - span[0] > kernel_args.max_blocks) return refuse("a piece of fewer blocks");
    if (read_integers(args + 5, 1, &offset) < 0 || borrow(args[1], span[1], 0, &blocks) < 0) return NULL;
    if (borrow_rows(args[4], span[1], &rows) < 0) return give_back(&blocks), NULL;
    rows.base += offset;
    write_to_host(&kernel_args, &blocks, &rows, span);
    give_back(&blocks);
    give_back(&rows.ids);
    int status = copy_to_device(&self->driver, &kernel_args, span[1] - span[0]);
    return report(self, status, "copying the arguments of a kernel");
}

static int start_kernel(const Driver *driver, const Launch *launch, Handle args, int64_t num_blocks,
                        Handle stream) {
    int64_t tiles = num_blocks * launch->num_tiles;
    int64_t programs = launch->tiles > 0 ? (tiles + launch->tiles - 1) / launch->tiles : 0;
    uint64_t null = 0, values[] = {launch->table, args, num_blocks, launch->num_tiles};
    /* The driver reads as many arguments as the kernel has. Triton's compiler adds some, which are null. */
    void *arguments[] = {&values[0], &values[1], &values[2], &values[3], &null, &null, &null, &null};
    if (programs > launch->programs) programs = launch->programs;
    return driver->launch(launch->function, programs < 1 ? 1 : programs, 1, 1, launch->threads, 1, 1,
                          launch->shared_bytes, stream, arguments, NULL);
}

static int launch_kernel(const Driver *driver, const Launch *launch, const KernelArgs *args,
                         const int64_t *numbers) {
    Handle stream = numbers[1], start = numbers[2], wait = numbers[3], done = numbers[4];
    int status = start ? driver->record(start, stream) : 0;
    if (!status && args->device) status = driver->wait_for(stream, args->copied, 0);
    if (!status && wait) status = driver->wait_for(stream, wait, 0);
    if (!status)
        status = start_kernel(driver, launch, args->device ? args->device : args->host, numbers[0], stream);
    return status || !done ? status : driver->record(done, stream);
}

/* launch(kernel, args, num_blocks, stream, start, wait, done) */
static PyObject *submitter_launch(Submitter *self, PyObject *const *args, Py_ssize_t given) {
    Launch launch;
    KernelArgs kernel_args;
    int64_t numbers[5];
    if (expect_count(given, 7) < 0 || read_tuple(args[0], 7, &launch.function) < 0) return NULL;
    if (read_tuple(args[1], 5, &kernel_args.host) < 0 || read_integers(args + 2, 5, numbers) < 0)
        return NULL;
    return report(self, launch_kernel(&self->driver, &launch, &kernel_args, numbers), "launching a kernel");
}

static int are_within(const Array *ids, int64_t first, int64_t limit) {
    for (Py_ssize_t i = 0; i < ids->count; i++)
        if (get(ids, i) < first || get(ids, i) >= limit) return 0;
    return 1;
}

/* Return 0 if a job is simple and the engine's stream idle, else NOT_READY or an error of the driver. */
static int expect_simple(const Submitter *self, const SimpleBounds *bounds, const Array *blocks,
                         const Array *slots, Handle engine) {
    int is_simple = blocks->count && blocks->count == slots->count &&
                    are_within(blocks, NULL_BLOCK + 1, bounds->num_blocks) &&
                    are_within(slots, 0, bounds->num_slots);
    return is_simple ? self->driver.query_stream(engine) : NOT_READY;
}

static PyObject *answer(Submitter *self, int status, const char *what) {
    if (status == NOT_READY) Py_RETURN_FALSE;
    if (status == 0) Py_RETURN_TRUE;
    return report(self, status, what);
}

/* is_simple(bounds, blocks, slots, engine) */
static PyObject *submitter_is_simple(Submitter *self, PyObject *const *args, Py_ssize_t given) {
    SimpleBounds bounds;
    Array blocks, slots;
    int64_t engine;
    if (expect_count(given, 4) < 0 || read_tuple(args[0], 4, &bounds.first) < 0) return NULL;
    if (read_integers(args + 3, 1, &engine) < 0 || borrow(args[1], 0, 0, &blocks) < 0) return NULL;
    if (borrow(args[2], 0, 0, &slots) < 0) return give_back(&blocks), NULL;
    int status = expect_simple(self, &bounds, &blocks, &slots, engine);
    give_back(&blocks);
    give_back(&slots);
    return answer(self, status, "asking for a stream");
}

/* -- a copy --------------------------------------------------------------------------------------------- */

typedef struct {
    Handle *device, *host;
    size_t *size;
    int64_t count;
} Ranges;

/* Append a page to the ranges. It extends the last range if it follows that at both ends and does not cross
 * a seam of the pool. */
static void append(const Submitter *self, Ranges *ranges, Handle device, Handle host, size_t size) {
    int64_t last = ranges->count - 1;
    if (last >= 0 && ranges->device[last] + ranges->size[last] == device &&
        ranges->host[last] + ranges->size[last] == host &&
        (host - self->address) / self->seam == (ranges->host[last] - self->address) / self->seam) {
        ranges->size[last] += size;
        return;
    }
    ranges->device[ranges->count] = device;
    ranges->host[ranges->count] = host;
    ranges->size[ranges->count++] = size;
}

static void find_ranges(const Submitter *self, const Array *pages, const Array *blocks, const Rows *rows,
                        const int64_t *span, Ranges *ranges) {
    for (int64_t i = 0; i < span[1] - span[0]; i++) {
        int64_t block = blocks->count ? get(blocks, span[0] + i) : i, row = address_of(rows, span[0], i);
        for (Py_ssize_t page = 0; page < pages[BASE].count; page++) {
            int64_t host = row + get(&pages[OFFSET], page);
            int64_t device = get(&pages[BASE], page) + block * get(&pages[STRIDE], page);
            append(self, ranges, device, host, get(&pages[SIZE], page));
        }
    }
}

/* Copy ranges in batches, the first of `some` ranges, on two streams in turn, which may be the same. */
static int copy_ranges(const Submitter *self, const Ranges *ranges, const Handle *streams, int64_t some) {
    Handle *dst = self->to_pool ? ranges->host : ranges->device;
    Handle *src = self->to_pool ? ranges->device : ranges->host;
    int64_t most = self->driver.copy_batch == NULL ? 1 : self->batch_ranges;
    int status = 0;
    for (int64_t at = 0, turn = 0; at < ranges->count && !status; turn = !turn) {
        int64_t left = ranges->count - at, batch = some < most ? some : most;
        size_t count = left < batch ? left : batch, first = 0, failed = 0;
        BatchAttributes in_stream_order = {1, {0, 0}, {0, 0}, 0};
        status = count == 1 ? self->driver.copy(dst[at], src[at], ranges->size[at], streams[turn])
                            : self->driver.copy_batch(dst + at, src + at, ranges->size + at, count,
                                                      &in_stream_order, &first, 1, &failed, streams[turn]);
        at += count;
        some = 2 * batch;
    }
    return status;
}

static int wait_on(const Driver *driver, const Handle *streams, int two, Handle event) {
    int status = driver->wait_for(streams[0], event, 0);
    return status || !two ? status : driver->wait_for(streams[1], event, 0);
}

static int copy_all(const Submitter *self, const Ranges *ranges, const int64_t *handles) {
    const Driver *driver = &self->driver;
    Handle side_done = handles[2], after = handles[3], start = handles[4];
    Handle wait = handles[5], done = handles[6];
    int two = side_done && ranges->count > 1 && ranges->size[0] < (size_t)self->small_range;
    Handle stream = handles[0], streams[] = {stream, two ? (Handle)handles[1] : stream};
    int status = after ? wait_on(driver, streams, two, after) : 0;
    if (!status && start) status = driver->record(start, stream);
    if (!status && wait) status = wait_on(driver, streams, two, wait);
    if (!status)
        status = copy_ranges(self, ranges, streams, start ? self->first_ranges : self->batch_ranges);
    if (!status && two) status = driver->record(side_done, streams[1]);
    if (!status && two) status = driver->wait_for(stream, side_done, 0);
    return status || !done ? status : driver->record(done, stream);
}

static PyObject *copy_pages(Submitter *self, const Array *pages, const Array *blocks, const Rows *rows,
                            const int64_t *span, const int64_t *handles) {
    size_t most = (span[1] - span[0]) * pages[BASE].count;
    uint64_t *room = PyMem_Malloc((3 * most + 1) * sizeof(uint64_t));
    if (room == NULL) return PyErr_NoMemory();
    Ranges ranges = {room, room + most, (size_t *)(room + 2 * most), 0};
    find_ranges(self, pages, blocks, rows, span, &ranges);
    int status = copy_all(self, &ranges, handles);
    PyMem_Free(room);
    return report(self, status, "copying over the bus");
}

/* copy(pages, blocks, first, last, rows, stream, side, side_done, after, start, wait, done) */
static PyObject *submitter_copy(Submitter *self, PyObject *const *args, Py_ssize_t given) {
    PyObject *result = NULL;
    int64_t span[2], handles[7];
    Array pages[NUM_COLUMNS], blocks;
    Rows rows;
    int held = 0;
    if (expect_count(given, 12) < 0 || read_span(args + 2, span) < 0 ||
        read_integers(args + 5, 7, handles) < 0)
        return NULL;
    if (expect_tuple(args[0], NUM_COLUMNS) < 0 || borrow(args[1], span[1], 1, &blocks) < 0) return NULL;
    for (; held < NUM_COLUMNS; held++)
        if (borrow(PyTuple_GetItem(args[0], held), held == BASE ? 1 : pages[BASE].count, 0,
                   &pages[held]) < 0)
            goto release;
    if (borrow_rows(args[4], span[1], &rows) < 0) goto release;
    result = copy_pages(self, pages, &blocks, &rows, span, handles);
    give_back(&rows.ids);
release:
    while (held > 0) give_back(&pages[--held]);
    give_back(&blocks);
    return result;
}

/* -- a piece -------------------------------------------------------------------------------------------- */

typedef PyObject *(*Command)(Submitter *, PyObject *const *, Py_ssize_t);
enum { NUM_COMMANDS = 3, MOST_ARGUMENTS = 12 };
/* The function of each `CommandKind`, which is the last field of a command. */
static const Command COMMANDS[NUM_COMMANDS] = {submitter_write_args, submitter_launch, submitter_copy};

/* Return an argument of a command. A string is a `Placeholder`, replaced by an argument of `play`. */
static PyObject *find_argument(PyObject *named, PyObject *const *own) {
    /* No two names begin with the same letter. */
    static const char *const NAMES[] = {"blocks", "first", "last", "count", "rows", "start", "wait"};
    if (!PyUnicode_Check(named) || PyUnicode_GetLength(named) == 0) return named;
    Py_UCS4 initial = PyUnicode_ReadChar(named, 0);
    for (int i = 0; i < (int)(sizeof(NAMES) / sizeof(NAMES[0])); i++)
        if (initial == (Py_UCS4)NAMES[i][0])
            return PyUnicode_CompareWithASCIIString(named, NAMES[i]) == 0 ? own[i] : named;
    return named;
}

static PyObject *play_command(Submitter *self, PyObject *command, PyObject *const *own) {
    PyObject *args[MOST_ARGUMENTS];
    Py_ssize_t given = PyTuple_Check(command) ? PyTuple_Size(command) - 1 : -1;
    PyObject *kind = given >= 0 ? PyTuple_GetItem(command, given) : NULL;
    int64_t which = -1;
    if (kind != NULL && read_integers(&kind, 1, &which) < 0) return NULL;
    if (which < 0 || which >= NUM_COMMANDS || given > MOST_ARGUMENTS)
        return PyErr_Clear(), refuse("a script of commands");
    for (int i = 0; i < given; i++) args[i] = find_argument(PyTuple_GetItem(command, i), own);
    return COMMANDS[which](self, args, given);
}

/* play(script, blocks, first, last, count, rows, start, wait) */
static PyObject *submitter_play(Submitter *self, PyObject *const *args, Py_ssize_t given) {
    if (expect_count(given, 8) < 0) return NULL;
    if (!PyTuple_Check(args[0])) return refuse("a script of commands");
    for (Py_ssize_t i = 0; i < PyTuple_Size(args[0]); i++) {
        PyObject *done = play_command(self, PyTuple_GetItem(args[0], i), args + 1);
        if (done == NULL) return NULL;
        Py_DECREF(done);
    }
    Py_RETURN_NONE;
}

/* -- asking and waiting --------------------------------------------------------------------------------- */

static PyObject *ask(Submitter *self, int (*query)(Handle), PyObject *handle, const char *what) {
    int64_t number;
    if (read_integers(&handle, 1, &number) < 0) return NULL;
    return answer(self, query(number), what);
}

static PyObject *submitter_is_over(Submitter *self, PyObject *event) {
    return ask(self, self->driver.query_event, event, "asking for an event");
}

static PyObject *submitter_is_idle(Submitter *self, PyObject *stream) {
    return ask(self, self->driver.query_stream, stream, "asking for a stream");
}

static PyObject *submitter_wait_over(Submitter *self, PyObject *event) {
    int64_t number;
    int status;
    if (read_integers(&event, 1, &number) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = self->driver.wait_over(number);
    Py_END_ALLOW_THREADS
    return report(self, status, "waiting for an event");
}

static PyObject *submitter_seconds_between(Submitter *self, PyObject *const *args, Py_ssize_t given) {
    int64_t events[2];
    float milliseconds = 0;
    if (expect_count(given, 2) < 0 || read_integers(args, 2, events) < 0) return NULL;
    int status = self->driver.elapsed(&milliseconds, events[0], events[1]);
    return status ? report(self, status, "reading the time between events")
                  : PyFloat_FromDouble(milliseconds / 1000.0);
}

/* -- the type ------------------------------------------------------------------------------------------- */

/* Submitter(functions, fail, to_pool, address, seam, small_range, first_ranges, batch_ranges): `functions`
 * holds the addresses of `Driver`. */
static PyObject *submitter_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *functions, *fail;
    long long of[6];
    if (kwargs != NULL && PyDict_Size(kwargs) > 0) return refuse("no keywords");
    if (!PyArg_ParseTuple(args, "SOLLLLLL", &functions, &fail, &of[0], &of[1], &of[2], &of[3], &of[4],
                          &of[5]))
        return NULL;
    if (PyBytes_Size(functions) != sizeof(Driver) || of[2] < 1 || of[4] < 1 || of[5] < 1)
        return refuse("nine addresses, a seam and batches");
    Submitter *self = (Submitter *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    memcpy(&self->driver, PyBytes_AsString(functions), sizeof(Driver));
    self->fail = Py_NewRef(fail);
    self->to_pool = of[0], self->address = of[1], self->seam = of[2];
    self->small_range = of[3], self->first_ranges = of[4], self->batch_ranges = of[5];
    return (PyObject *)self;
}

static void submitter_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(((Submitter *)self)->fail);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMethodDef submitter_methods[] = {
    {"write_args", (PyCFunction)(void (*)(void))submitter_write_args, METH_FASTCALL, NULL},
    {"is_simple", (PyCFunction)(void (*)(void))submitter_is_simple, METH_FASTCALL, NULL},
    {"play", (PyCFunction)(void (*)(void))submitter_play, METH_FASTCALL, NULL},
    {"launch", (PyCFunction)(void (*)(void))submitter_launch, METH_FASTCALL, NULL},
    {"copy", (PyCFunction)(void (*)(void))submitter_copy, METH_FASTCALL, NULL},
    {"is_over", (PyCFunction)submitter_is_over, METH_O, NULL},
    {"is_idle", (PyCFunction)submitter_is_idle, METH_O, NULL},
    {"wait_over", (PyCFunction)submitter_wait_over, METH_O, NULL},
    {"seconds_between", (PyCFunction)(void (*)(void))submitter_seconds_between, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot submitter_slots[] = {
    {Py_tp_new, submitter_new}, {Py_tp_dealloc, submitter_dealloc}, {Py_tp_methods, submitter_methods},
        {0, NULL},
};
static PyType_Spec submitter_spec = {"kvtier.native._cuda.Submitter", sizeof(Submitter), 0,
                                     Py_TPFLAGS_DEFAULT, submitter_slots};

static int fill_module(PyObject *module) {
    PyObject *type = PyType_FromSpec(&submitter_spec);
    int status = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return status;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill_module}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cuda", NULL, 0, NULL, slots, NULL, NULL,
                                        NULL};

PyMODINIT_FUNC PyInit__cuda(void) { return PyModuleDef_Init(&definition); }
