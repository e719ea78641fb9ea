/* Packed blocks: `kvtier.packing.pack_python` and `unpack_python`, without the GIL. That module
 * explains the form, and docs/formats.md has its bytes; tests/unit/test_packing.py compares the two.
 *
 * A unit is `rows` rows of `width` channels. Loops run over channels, so that they become vector
 * instructions; where the linker can choose at the start, each is compiled for several generations of
 * processors. The module is optional.
 */
#define Py_LIMITED_API 0x030B0000 /* one binary for every Python from 3.11 on */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "packed blocks are little-endian"
#endif
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

enum { ZERO = 14, EXCEPTION = 15, MOST_SCALE = 3, SCALE_STEP = 4 };
enum { HEAD_WORDS = 2, START_BITS = 24, MOST_WIDTH = 8192 };

/* As `PackedPages` writes it: the row's offset, the shape's check, and the fields of `BlockFormat`. */
typedef struct {
    int64_t offset, check, rows, max_exceptions, exceptions, scales, codes, rest, bytes;
} Geometry;
enum { GEOMETRY_LENGTH = sizeof(Geometry) / sizeof(int64_t) };

typedef struct {
    uint8_t *scales, *codes, *rest;
} Unit;

/* Find each channel's largest exponent that is neither infinite nor NaN, and return the largest of all. */
FOR_EACH_PROCESSOR
static uint16_t find_highest(const uint16_t *values, Py_ssize_t rows, Py_ssize_t width, uint16_t *highest) {
    memset(highest, 0, width * sizeof *highest);
    for (Py_ssize_t row = 0; row < rows; row++, values += width)
        for (Py_ssize_t i = 0; i < width; i++) {
            uint16_t exponent = values[i] >> 7 & 0xFF;
            exponent = exponent == 0xFF ? 0 : exponent;
            highest[i] = highest[i] > exponent ? highest[i] : exponent;
        }
    uint16_t base = 0;
    for (Py_ssize_t i = 0; i < width; i++) base = base > highest[i] ? base : highest[i];
    return base;
}

/* Turn the largest exponents of channels into the exponents of code 0, and write the scales. */
static void write_scales(uint16_t *highest, Py_ssize_t width, uint16_t base, uint8_t *scales) {
    for (Py_ssize_t i = 0; i < width; i += 4) {
        uint8_t four = 0;
        for (int k = 0; k < 4; k++) {
            uint16_t scale = (base - highest[i + k]) / SCALE_STEP;
            scale = scale < MOST_SCALE ? scale : MOST_SCALE;
            four |= scale << (2 * k);
            highest[i + k] = base - SCALE_STEP * scale;
        }
        scales[i / 4] = four;
    }
}

static void read_scales(const uint8_t *scales, Py_ssize_t width, uint16_t base, uint16_t *first) {
    for (Py_ssize_t i = 0; i < width; i++)
        first[i] = base - SCALE_STEP * (scales[i / 4] >> 2 * (i % 4) & 3);
}

/* Write codes and rest of a row; `code` is scratch and has the codes afterwards. Return its exceptions. */
FOR_EACH_PROCESSOR
static int pack_row(const uint16_t *values, const uint16_t *first, Py_ssize_t width, uint16_t *code,
                    uint8_t *codes, uint8_t *rest) {
    uint16_t exceptions = 0;
    for (Py_ssize_t i = 0; i < width; i++) {
        uint16_t exponent = values[i] >> 7 & 0xFF, below = first[i] - exponent;
        uint16_t found = below < ZERO ? below : EXCEPTION;
        found = exponent ? found : ZERO;
        code[i] = found;
        exceptions += found == EXCEPTION;
        rest[i] = (values[i] & 0x7F) | (values[i] >> 8 & 0x80);
    }
    for (Py_ssize_t i = 0; i < width / 2; i++) {
        uint32_t two;
        memcpy(&two, code + 2 * i, sizeof two);
        codes[i] = two | two >> 12;
    }
    return exceptions;
}

FOR_EACH_PROCESSOR
static void unpack_row(uint16_t *values, const uint16_t *first, Py_ssize_t width, uint16_t *code,
                       const uint8_t *codes, const uint8_t *rest) {
    for (Py_ssize_t i = 0; i < width / 2; i++) {
        uint32_t two = (codes[i] & 15u) | (codes[i] >> 4) << 16;
        memcpy(code + 2 * i, &two, sizeof two);
    }
    for (Py_ssize_t i = 0; i < width; i++) {
        uint16_t exponent = code[i] == ZERO ? 0 : (first[i] - code[i]) & 0xFF;
        values[i] = (rest[i] & 0x80) << 8 | exponent << 7 | (rest[i] & 0x7F);
    }
}

static int64_t pack_unit(const uint16_t *values, Py_ssize_t rows, Py_ssize_t width, Unit to,
                         uint32_t *exceptions, int64_t count, int64_t max_exceptions, uint32_t *word) {
    uint16_t first[MOST_WIDTH], code[MOST_WIDTH];
    uint16_t base = find_highest(values, rows, width, first);
    write_scales(first, width, base, to.scales);
    *word = (uint32_t)base << START_BITS | (uint32_t)(count < max_exceptions ? count : max_exceptions);
    for (Py_ssize_t row = 0; row < rows; row++) {
        Py_ssize_t at = row * width;
        if (!pack_row(values + at, first, width, code, to.codes + at / 2, to.rest + at)) continue;
        for (Py_ssize_t i = 0; i < width; i++) {
            if (code[i] != EXCEPTION) continue;
            if (count < max_exceptions)
                exceptions[count] = (uint32_t)(at + i) | (uint32_t)values[at + i] << 16;
            count++;
        }
    }
    return count;
}

static void unpack_unit(uint16_t *values, Py_ssize_t rows, Py_ssize_t width, Unit from, uint16_t base) {
    uint16_t first[MOST_WIDTH], code[MOST_WIDTH];
    read_scales(from.scales, width, base, first);
    for (Py_ssize_t row = 0; row < rows; row++) {
        Py_ssize_t at = row * width;
        unpack_row(values + at, first, width, code, from.codes + at / 2, from.rest + at);
    }
}

typedef struct {
    Geometry geometry;
    Py_ssize_t num_pages;
    const Py_buffer *pages;
    const int64_t *channels;
} Blocks;

static Unit unit_at(char *packed, const Geometry *geometry, int64_t value) {
    uint8_t *start = (uint8_t *)packed;
    return (Unit){start + geometry->scales + value / (4 * geometry->rows),
                  start + geometry->codes + value / 2, start + geometry->rest + value};
}

static int64_t pack_block(const Blocks *all, char *packed, int64_t block) {
    const Geometry *geometry = &all->geometry;
    uint32_t *head = (uint32_t *)packed, *exceptions = (uint32_t *)(packed + geometry->exceptions);
    int64_t count = 0, value = 0, unit = HEAD_WORDS;
    for (Py_ssize_t p = 0; p < all->num_pages; p++) {
        const Py_buffer *page = &all->pages[p];
        const uint16_t *values = (const uint16_t *)((char *)page->buf + block * page->strides[0]);
        int64_t size = geometry->rows * all->channels[p], end = value + page->shape[1] / 2;
        for (; value < end; value += size, values += size, unit++)
            count = pack_unit(values, geometry->rows, all->channels[p], unit_at(packed, geometry, value),
                              exceptions, count, geometry->max_exceptions, &head[unit]);
    }
    int64_t kept = count < geometry->max_exceptions ? count : geometry->max_exceptions;
    head[0] = (uint32_t)(kept + (count > kept));
    head[1] = (uint32_t)geometry->check;
    /* What is not used is zero: equal values make equal bytes. */
    memset(head + unit, 0, geometry->exceptions - 4 * unit);
    memset(exceptions + kept, 0, geometry->scales - geometry->exceptions - 4 * kept);
    memset(packed + geometry->scales + value / (4 * geometry->rows), 0,
           geometry->codes - geometry->scales - value / (4 * geometry->rows));
    memset(packed + geometry->codes + value / 2, 0, geometry->rest - geometry->codes - value / 2);
    memset(packed + geometry->rest + value, 0, geometry->bytes - geometry->rest - value);
    return count;
}

/* Return the number of exceptions if the head of a block can be believed, or else -1. */
static int64_t read_head(const uint32_t *head, const Geometry *geometry, int64_t num_units) {
    if (head[0] > geometry->max_exceptions || head[1] != (uint32_t)geometry->check) return -1;
    uint32_t before = 0;
    for (int64_t unit = 0; unit < num_units; unit++) {
        uint32_t start = head[HEAD_WORDS + unit] & ((1u << START_BITS) - 1);
        if (start < before || start > head[0] || (!unit && start)) return -1;
        before = start;
    }
    return head[0];
}

static int64_t unpack_block(const Blocks *all, char *packed, int64_t block, int64_t num_units) {
    const Geometry *geometry = &all->geometry;
    const uint32_t *head = (uint32_t *)packed, *exceptions = (uint32_t *)(packed + geometry->exceptions);
    int64_t count = read_head(head, geometry, num_units), value = 0, unit = 0;
    if (count < 0) return -1;
    for (Py_ssize_t p = 0; p < all->num_pages; p++) {
        const Py_buffer *page = &all->pages[p];
        uint16_t *values = (uint16_t *)((char *)page->buf + block * page->strides[0]);
        int64_t size = geometry->rows * all->channels[p], end = value + page->shape[1] / 2;
        for (; value < end; value += size, values += size, unit++) {
            uint32_t word = head[HEAD_WORDS + unit], start = word & ((1u << START_BITS) - 1);
            uint32_t stop = unit + 1 < num_units ? head[HEAD_WORDS + unit + 1] & ((1u << START_BITS) - 1)
                                                 : (uint32_t)count;
            unpack_unit(values, geometry->rows, all->channels[p], unit_at(packed, geometry, value),
                        word >> START_BITS);
            for (uint32_t i = start; i < stop; i++) {
                uint32_t position = exceptions[i] & 0xFFFF;
                if (position >= size) return -1;
                values[position] = exceptions[i] >> 16;
            }
        }
    }
    return count;
}

/* -- arguments: rows, pages, channels, geometry, slots, indices, blocks, counts ------------------------- */

enum { ROWS, CHANNELS, GEOMETRY, SLOTS, INDICES, BLOCKS, COUNTS, NUM_BUFFERS };

static int is_ints(const Py_buffer *array, Py_ssize_t length) {
    return array->ndim == 1 && array->itemsize == 8 && array->shape[0] == length;
}

static int are_within(const Py_buffer *array, int64_t limit) {
    for (Py_ssize_t i = 0; i < array->shape[0]; i++)
        if (((const int64_t *)array->buf)[i] < 0 || ((const int64_t *)array->buf)[i] >= limit) return 0;
    return 1;
}

/* Return the number of units, or -1 if the parts of the geometry do not hold them. */
static int64_t count_units(const Blocks *all) {
    const Geometry *g = &all->geometry;
    int64_t units = 0, values = 0;
    if (g->rows < 1 || g->offset < 0 || g->max_exceptions < 0 || g->max_exceptions >= 1 << START_BITS)
        return -1;
    for (Py_ssize_t p = 0; p < all->num_pages; p++) {
        const Py_buffer *page = &all->pages[p];
        int64_t width = all->channels[p];
        if (page->ndim != 2 || page->itemsize != 1 || page->strides[1] != 1 || width < 4 || width % 4 ||
            width > MOST_WIDTH || page->shape[1] % (2 * g->rows * width) || (uintptr_t)page->buf % 2 ||
            page->strides[0] % 2)
            return -1;
        units += page->shape[1] / (2 * g->rows * width);
        values += page->shape[1] / 2;
    }
    int fits = 4 * (HEAD_WORDS + units) <= g->exceptions &&
               g->exceptions + 4 * g->max_exceptions <= g->scales &&
               g->scales + values / (4 * g->rows) <= g->codes && g->codes + values / 2 <= g->rest &&
               g->rest + values <= g->bytes && g->exceptions % 4 == 0;
    return fits ? units : -1;
}

static int64_t checked_units(const Blocks *all, const Py_buffer *with) {
    const Py_buffer *rows = &with[ROWS];
    Py_ssize_t count = with[BLOCKS].ndim == 1 ? with[BLOCKS].shape[0] : -1;
    if (rows->ndim != 2 || rows->itemsize != 1 || rows->strides[1] != 1 || rows->strides[0] % 4 ||
        (uintptr_t)rows->buf % 4 || all->geometry.offset % 4 || all->geometry.bytes % 4)
        return -1;
    for (int i = SLOTS; i < NUM_BUFFERS; i++)
        if (!is_ints(&with[i], count)) return -1;
    int64_t units = count_units(all);
    if (units < 0 || !are_within(&with[SLOTS], rows->shape[0]) ||
        !are_within(&with[INDICES], (rows->shape[1] - all->geometry.offset) / all->geometry.bytes))
        return -1;
    for (Py_ssize_t p = 0; p < all->num_pages; p++)
        if (!are_within(&with[BLOCKS], all->pages[p].shape[0])) return -1;
    return units;
}

static void run(const Blocks *all, const Py_buffer *with, int64_t units, int packs) {
    const int64_t *slots = with[SLOTS].buf, *indices = with[INDICES].buf, *blocks = with[BLOCKS].buf;
    for (Py_ssize_t i = 0; i < with[BLOCKS].shape[0]; i++) {
        char *packed = (char *)with[ROWS].buf + slots[i] * with[ROWS].strides[0] + all->geometry.offset +
                       indices[i] * all->geometry.bytes;
        ((int64_t *)with[COUNTS].buf)[i] =
            packs ? pack_block(all, packed, blocks[i]) : unpack_block(all, packed, blocks[i], units);
    }
}

static PyObject *call(PyObject *args, int packs) {
    PyObject *objects[NUM_BUFFERS], *tuple, *result = NULL;
    Py_buffer with[NUM_BUFFERS], *pages = NULL;
    Py_ssize_t num_pages = 0;
    int held = 0;
    if (!PyArg_ParseTuple(args, "OO!OOOOOO", &objects[ROWS], &PyTuple_Type, &tuple, &objects[CHANNELS],
                          &objects[GEOMETRY], &objects[SLOTS], &objects[INDICES], &objects[BLOCKS],
                          &objects[COUNTS]))
        return NULL;
    for (; held < NUM_BUFFERS; held++) {
        int is_written = held == COUNTS || (held == ROWS && packs);
        int flags = held == ROWS ? PyBUF_STRIDES : PyBUF_ND;
        if (is_written) flags |= PyBUF_WRITABLE;
        if (PyObject_GetBuffer(objects[held], &with[held], flags) < 0) goto release;
    }
    Py_ssize_t count = PyTuple_Size(tuple);
    if (!(pages = PyMem_Calloc(count ? count : 1, sizeof *pages))) {
        PyErr_NoMemory();
        goto release;
    }
    for (; num_pages < count; num_pages++) {
        int flags = packs ? PyBUF_STRIDED_RO : PyBUF_STRIDED;
        PyObject *page = PyTuple_GetItem(tuple, num_pages);
        if (PyObject_GetBuffer(page, &pages[num_pages], flags) < 0) goto release;
    }
    Blocks all = {.num_pages = num_pages, .pages = pages, .channels = with[CHANNELS].buf};
    int64_t units = -1;
    if (is_ints(&with[GEOMETRY], GEOMETRY_LENGTH) && is_ints(&with[CHANNELS], num_pages)) {
        memcpy(&all.geometry, with[GEOMETRY].buf, sizeof all.geometry);
        units = checked_units(&all, with);
    }
    if (units < 0) {
        PyErr_SetString(PyExc_ValueError,
                        "expected rows (slots, bytes), a tuple of pages (blocks, bytes) that are whole "
                        "units of their channels, a geometry that holds them, and four int64 arrays of "
                        "one length within their bounds");
        goto release;
    }
    Py_BEGIN_ALLOW_THREADS
    run(&all, with, units, packs);
    Py_END_ALLOW_THREADS
    Py_INCREF(Py_None);
    result = Py_None;
release:
    while (num_pages > 0) PyBuffer_Release(&pages[--num_pages]);
    PyMem_Free(pages);
    while (held > 0) PyBuffer_Release(&with[--held]);
    return result;
}

static PyObject *pack(PyObject *module, PyObject *args) {
    (void)module;
    return call(args, 1);
}

static PyObject *unpack(PyObject *module, PyObject *args) {
    (void)module;
    return call(args, 0);
}

static PyMethodDef methods[] = {
    {"pack", pack, METH_VARARGS,
     "pack(rows, pages, channels, geometry, slots, indices, blocks, counts): pack blocks into rows."},
    {"unpack", unpack, METH_VARARGS,
     "unpack(rows, pages, channels, geometry, slots, indices, blocks, counts): unpack blocks of rows."},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_packing", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__packing(void) { return PyModuleDef_Init(&definition); }
