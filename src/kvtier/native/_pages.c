/* Copies of scattered pages: `kvtier.transfer.pages.store_python` and `load_python` in one call without the
 * GIL.
 *
 * Where the processor can, pages are written past its caches. Stored pages are not read again soon, and
 * loaded pages are more than the caches hold. A write that need not fetch the cache line first costs a third
 * less memory traffic, so scattered pages are copied as fast as one large memcpy. This module is optional:
 * where it was not compiled, the Python form does the same, slower. tests/unit/test_pages.py compares them.
 */
#define Py_LIMITED_API 0x030B0000 /* one binary for every Python from 3.11 on */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { POOL, ENGINE, SLOTS, INDICES, BLOCKS, NUM_BUFFERS };
enum { LINE = 64, AHEAD = 2048 };

/* One end of the copy: block i is at `start + first[i] * first_stride + second[i] * second_stride`. */
typedef struct {
    char *start;
    const int64_t *first, *second;
    Py_ssize_t first_stride, second_stride, ref_stride;
} End;

static char *block(const End *end, Py_ssize_t i) {
    return end->start + end->first[i] * end->first_stride +
           (end->second ? end->second[i] * end->second_stride : 0);
}

/* Copy a page and prefetch ahead, into the next page too: processors do not predict scattered pages. */
static void copy_page(char *to, const char *from, Py_ssize_t size, const char *next) {
    Py_ssize_t done = 0;
#ifdef __SSE2__
    if ((uintptr_t)to % 16 == 0) {
        for (; done + LINE <= size; done += LINE) {
            const __m128i *source = (const __m128i *)(from + done);
            __m128i *target = (__m128i *)(to + done);
            Py_ssize_t ahead = done + AHEAD;
            _mm_prefetch(ahead < size ? from + ahead : next + (ahead - size), _MM_HINT_T0);
            __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
            __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
            _mm_stream_si128(target, a);
            _mm_stream_si128(target + 1, b);
            _mm_stream_si128(target + 2, c);
            _mm_stream_si128(target + 3, d);
        }
    }
#else
    (void)next;
#endif
    memcpy(to + done, from + done, size - done);
}

static void copy_blocks(const End *to, const End *from, Py_ssize_t count, Py_ssize_t refs, Py_ssize_t page) {
    for (Py_ssize_t i = 0; i < count; i++) {
        char *target = block(to, i), *source = block(from, i);
        char *following = block(from, i + 1 < count ? i + 1 : i);
        for (Py_ssize_t ref = 0; ref < refs; ref++) {
            char *next = ref + 1 < refs ? source + from->ref_stride : following;
            copy_page(target, source, page, next);
            target += to->ref_stride;
            source = next;
        }
    }
#ifdef __SSE2__
    _mm_sfence(); /* all streamed writes are visible before the caller reports them */
#endif
}

/* Say whether an index array is 64-bit, as long as the others, and within bounds. */
static int is_index(const Py_buffer *index, Py_ssize_t count, Py_ssize_t limit) {
    if (index->ndim != 1 || index->itemsize != 8 || index->shape[0] != count) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t value = ((const int64_t *)index->buf)[i];
        if (value < 0 || value >= limit) return 0;
    }
    return 1;
}

static int is_valid(const Py_buffer *with) {
    const Py_buffer *pool = &with[POOL], *engine = &with[ENGINE];
    if (pool->ndim != 4 || engine->ndim != 3 || pool->itemsize != 1 || engine->itemsize != 1) return 0;
    if (pool->shape[2] != engine->shape[1] || pool->shape[3] != engine->shape[2]) return 0;
    if (pool->strides[3] != 1 || engine->strides[2] != 1 || with[BLOCKS].ndim != 1) return 0;
    Py_ssize_t count = with[BLOCKS].shape[0];
    return is_index(&with[SLOTS], count, pool->shape[0]) &&
           is_index(&with[INDICES], count, pool->shape[1]) &&
           is_index(&with[BLOCKS], count, engine->shape[0]);
}

static PyObject *copy(PyObject *args, int target) {
    PyObject *objects[NUM_BUFFERS], *result = NULL;
    Py_buffer with[NUM_BUFFERS];
    int held = 0;
    if (!PyArg_ParseTuple(args, "OOOOO", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4]))
        return NULL;
    for (; held < NUM_BUFFERS; held++) {
        int flags = held >= SLOTS ? PyBUF_ND : held == target ? PyBUF_STRIDED : PyBUF_STRIDED_RO;
        if (PyObject_GetBuffer(objects[held], &with[held], flags) < 0) goto release;
    }
    if (!is_valid(with)) {
        PyErr_SetString(PyExc_ValueError,
                        "expected pool (slots, indices, refs, page) and engine (blocks, refs, page) of "
                        "bytes, and three int64 arrays of one length within their bounds");
        goto release;
    }
    const Py_ssize_t *in_pool = with[POOL].strides, *in_engine = with[ENGINE].strides;
    End ends[] = {
        {with[POOL].buf, with[SLOTS].buf, with[INDICES].buf, in_pool[0], in_pool[1], in_pool[2]},
        {with[ENGINE].buf, with[BLOCKS].buf, NULL, in_engine[0], 0, in_engine[1]},
    };
    Py_BEGIN_ALLOW_THREADS
    copy_blocks(&ends[target], &ends[!target], with[BLOCKS].shape[0], with[ENGINE].shape[1],
                with[ENGINE].shape[2]);
    Py_END_ALLOW_THREADS
    Py_INCREF(Py_None);
    result = Py_None;
release:
    while (held > 0) PyBuffer_Release(&with[--held]);
    return result;
}

static PyObject *store(PyObject *module, PyObject *args) {
    (void)module;
    return copy(args, POOL);
}

static PyObject *load(PyObject *module, PyObject *args) {
    (void)module;
    return copy(args, ENGINE);
}

static PyMethodDef methods[] = {
    {"store", store, METH_VARARGS,
     "store(pool, engine, slots, indices, blocks): pool[slots, indices] = engine[blocks]."},
    {"load", load, METH_VARARGS,
     "load(pool, engine, slots, indices, blocks): engine[blocks] = pool[slots, indices]."},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_pages", NULL, 0, methods, slots, NULL, NULL,
                                        NULL};

PyMODINIT_FUNC PyInit__pages(void) { return PyModuleDef_Init(&definition); }
