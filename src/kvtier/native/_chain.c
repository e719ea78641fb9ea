/* The chain of plain block hashes: `kvtier.keys._chain_python` without a Python call for each block.
 *
 * The hash is BLAKE2b as in RFC 7693, unkeyed, with a digest of 32 bytes, personalised "kvtier block". This
 * module is optional: where it was not compiled, the Python form gives the same hashes in twice the time.
 * tests/unit/test_keys.py compares the two.
 */
#define Py_LIMITED_API 0x030B0000 /* one binary for every Python from 3.11 on */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "written for little-endian machines; the Python version serves the others"
#endif

enum { HASH_BYTES = 32, TOKEN_BYTES = 4, PIECE_BYTES = 128 };

static const uint64_t IV[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

static const uint8_t SIGMA[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static inline uint64_t rotr(uint64_t x, int n) { return x >> n | x << (64 - n); }

#define MIX(a, b, c, d, x, y)    \
    v[a] += v[b] + m[x];         \
    v[d] = rotr(v[d] ^ v[a], 32); \
    v[c] += v[d];                \
    v[b] = rotr(v[b] ^ v[c], 24); \
    v[a] += v[b] + m[y];         \
    v[d] = rotr(v[d] ^ v[a], 16); \
    v[c] += v[d];                \
    v[b] = rotr(v[b] ^ v[c], 63);

/* This is a macro and not a loop: with constant indices into SIGMA the whole state stays in registers. */
#define ROUND(r)                                       \
    MIX(0, 4, 8, 12, SIGMA[r][0], SIGMA[r][1])         \
    MIX(1, 5, 9, 13, SIGMA[r][2], SIGMA[r][3])         \
    MIX(2, 6, 10, 14, SIGMA[r][4], SIGMA[r][5])        \
    MIX(3, 7, 11, 15, SIGMA[r][6], SIGMA[r][7])        \
    MIX(0, 5, 10, 15, SIGMA[r][8], SIGMA[r][9])        \
    MIX(1, 6, 11, 12, SIGMA[r][10], SIGMA[r][11])      \
    MIX(2, 7, 8, 13, SIGMA[r][12], SIGMA[r][13])       \
    MIX(3, 4, 9, 14, SIGMA[r][14], SIGMA[r][15])

/* Absorb one piece (RFC 7693 calls it a block); `count` message bytes are absorbed then. */
static void compress(uint64_t h[8], const uint8_t *piece, uint64_t count, int last) {
    uint64_t m[16], v[16];
    memcpy(m, piece, sizeof m);
    memcpy(v, h, 64);
    memcpy(v + 8, IV, 64);
    v[12] ^= count;
    if (last) v[14] = ~v[14];
    ROUND(0) ROUND(1) ROUND(2) ROUND(3) ROUND(4) ROUND(5)
    ROUND(6) ROUND(7) ROUND(8) ROUND(9) ROUND(0) ROUND(1)
    for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
}

/* Hash `length` > 0 bytes of a buffer that is zero up to the next whole piece. */
static void hash_message(const uint8_t *message, size_t length, uint8_t digest[HASH_BYTES]) {
    static const char person[16] = "kvtier block";
    uint64_t h[8], personal[2];
    size_t done = 0;
    memcpy(h, IV, sizeof h);
    h[0] ^= 0x01010000 ^ HASH_BYTES; /* depth 1, fanout 1, no key */
    memcpy(personal, person, sizeof personal);
    h[6] ^= personal[0];
    h[7] ^= personal[1];
    for (; length - done > PIECE_BYTES; done += PIECE_BYTES)
        compress(h, message + done, done + PIECE_BYTES, 0);
    compress(h, message + done, length, 1);
    memcpy(digest, h, HASH_BYTES);
}

static int read_token(PyObject *item, uint32_t *out);

/* Read a token id that is not an int but has an __index__, such as a numpy integer. */
static int read_index(PyObject *item, uint32_t *out) {
    PyErr_Clear();
    PyObject *index = PyNumber_Index(item);
    if (index == NULL) return -1;
    int status = read_token(index, out);
    Py_DECREF(index);
    return status;
}

/* Read a token id; -1 with an exception set if the object is not one. */
static int read_token(PyObject *item, uint32_t *out) {
    if (item == NULL) return -1;
    unsigned long id = PyLong_AsUnsignedLong(item);
    if (id == (unsigned long)-1 && PyErr_Occurred()) return PyLong_Check(item) ? -1 : read_index(item, out);
    if (id > UINT32_MAX) {
        PyErr_Format(PyExc_OverflowError, "%lu is too large", id);
        return -1;
    }
    *out = (uint32_t)id;
    return 0;
}

/* Fill `hashes`; `message` holds the parent's hash and room for a block. */
static int fill(PyObject *hashes, PyObject *tokens, Py_ssize_t block_size, uint8_t *message) {
    size_t length = HASH_BYTES + TOKEN_BYTES * (size_t)block_size;
    uint32_t *ids = (uint32_t *)(message + HASH_BYTES);
    Py_ssize_t blocks = PyList_Size(hashes);
    for (Py_ssize_t block = 0; block < blocks; block++) {
        for (Py_ssize_t i = 0; i < block_size; i++) {
            if (read_token(PyList_GetItem(tokens, block * block_size + i), ids + i) < 0) return -1;
        }
        hash_message(message, length, message); /* the hash is the next parent */
        PyObject *hash = PyBytes_FromStringAndSize((const char *)message, HASH_BYTES);
        if (hash == NULL || PyList_SetItem(hashes, block, hash) < 0) return -1;
    }
    return 0;
}

static PyObject *chain(PyObject *module, PyObject *args) {
    PyObject *tokens;
    Py_ssize_t block_size, parent_bytes;
    const char *parent;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!ny#", &PyList_Type, &tokens, &block_size, &parent, &parent_bytes))
        return NULL;
    Py_ssize_t count = PyList_Size(tokens);
    if (block_size < 1 || parent_bytes != HASH_BYTES) {
        PyErr_SetString(PyExc_ValueError, "expected a positive block size and a parent of 32 bytes");
        return NULL;
    }
    if (count < block_size) return PyList_New(0);
    size_t room = HASH_BYTES + TOKEN_BYTES * (size_t)block_size + PIECE_BYTES;
    uint8_t *message = PyMem_Calloc(room, 1);
    if (message == NULL) return PyErr_NoMemory();
    memcpy(message, parent, HASH_BYTES);
    PyObject *hashes = PyList_New(count / block_size);
    if (hashes != NULL && fill(hashes, tokens, block_size, message) < 0) Py_CLEAR(hashes);
    PyMem_Free(message);
    return hashes;
}

static PyMethodDef methods[] = {
    {"chain", chain, METH_VARARGS,
     "chain(tokens, block_size, parent) -> list of hashes, one for each full block."},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_chain", NULL, 0, methods, slots, NULL, NULL,
                                        NULL};

PyMODINIT_FUNC PyInit__chain(void) { return PyModuleDef_Init(&definition); }
