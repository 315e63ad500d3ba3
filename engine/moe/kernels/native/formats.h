/* The number formats of weights: one row for each, of which the numbers, sizes and tables of kernels are made.

   A format's number is its place in PLLM_FORMATS, from 1 on. engine/models/formats/number_formats.py has the same names and
   sizes in the same order; the Python side refuses a library that has others. */
#ifndef PRIVATELLM_FORMATS_H
#define PRIVATELLM_FORMATS_H

enum { NO_TABLE, IQ4_TABLE, FP4_TABLE, GRID };

/* Packed in blocks, as GGUF files hold them: ggml's ggml-common.h and gguf's quants.py describe them.

   values, bytes   of a block
   codes           where its codes begin, in bytes
   bits            of a code as it is multiplied; codes of 8 bits are signed
   above           by how much codes that are multiplied without a sign are above what they stand for; those in the file
                   are so, too, where there is no table
   minimums        whether a block says what is to be taken away from its values
   shared          values that have a scale, and a minimum, in common: 32 or 16
   table           what the codes in the file stand for: those of four bits IQ4_VALUES or FP4_VALUES, those of a GRID
                   several values at once (packed_grids.h); NO_TABLE: themselves */
#define PLLM_BLOCK_FORMATS(ROW)                                                                                    \
    /*   name   values bytes codes bits above minimums shared table */                                             \
    ROW(Q4_0,     32,   18,   2,  4,   8,   0,    32, NO_TABLE)                                                    \
    ROW(Q4_1,     32,   20,   4,  4,   0,   1,    32, NO_TABLE)                                                    \
    ROW(Q5_0,     32,   22,   6,  5,  16,   0,    32, NO_TABLE)                                                    \
    ROW(Q5_1,     32,   24,   8,  5,   0,   1,    32, NO_TABLE)                                                    \
    ROW(Q8_0,     32,   34,   2,  8,   0,   0,    32, NO_TABLE)                                                    \
    ROW(Q4_K,    256,  144,  16,  4,   0,   1,    32, NO_TABLE)                                                    \
    ROW(Q5_K,    256,  176,  48,  5,   0,   1,    32, NO_TABLE)                                                    \
    ROW(Q6_K,    256,  210,   0,  6,  32,   0,    16, NO_TABLE)                                                    \
    ROW(IQ4_NL,   32,   18,   2,  8,   0,   0,    32, IQ4_TABLE)                                                   \
    ROW(IQ4_XS,  256,  136,   8,  8,   0,   0,    32, IQ4_TABLE)                                                   \
    ROW(MXFP4,    32,   17,   1,  5,  16,   0,    32, FP4_TABLE)                                                   \
    ROW(Q2_K,    256,   84,  16,  2,   0,   1,    16, NO_TABLE)                                                    \
    ROW(Q3_K,    256,  110,  32,  3,   4,   0,    16, NO_TABLE)                                                    \
    ROW(IQ3_S,   256,  110,   2,  5,  16,   0,    32, GRID)                                                        \
    ROW(IQ3_XXS, 256,   98,   2,  6,  32,   0,    32, GRID)                                                        \
    ROW(IQ2_XXS, 256,   66,   2,  7,  64,   0,    32, GRID)                                                        \
    ROW(IQ2_XS,  256,   74,   2,  7,  64,   0,    16, GRID)                                                        \
    ROW(IQ2_S,   256,   82,   2,  7,  64,   0,    16, GRID)                                                        \
    ROW(IQ1_S,   256,   50,   2,  5,  16,   0,    32, GRID)                                                        \
    ROW(IQ1_M,   256,   56,   0,  5,  16,   0,    16, GRID)                                                        \
    ROW(TQ1_0,   256,   54,   0,  2,   1,   0,    32, NO_TABLE)                                                    \
    ROW(TQ2_0,   256,   66,   0,  2,   1,   0,    32, NO_TABLE)                                                    \
    ROW(NVFP4,    64,   36,   4,  5,  16,   0,    16, FP4_TABLE)                                                   \
    ROW(Q1_0,    128,   18,   2,  2,   1,   0,    32, NO_TABLE)                                                    \
    ROW(Q2_0,     64,   18,   2,  2,   1,   0,    32, NO_TABLE)

/* What formats without blocks have in the other columns. */
#define UNPACKED 0, 0, 0, 0, 0, NO_TABLE

/* Grouped: codes that follow one another in two to eight bits, and the scales of their groups in arrays of their own.
   Values of the smallest group, and bytes of their codes. */
#define PLLM_GROUPED_FORMATS(ROW)                                                                                  \
    ROW(AFFINE4, 32, 16, UNPACKED)                                                                                 \
    ROW(AFFINE8, 32, 32, UNPACKED)                                                                                 \
    ROW(AFFINE2, 32,  8, UNPACKED)                                                                                 \
    ROW(AFFINE3, 32, 12, UNPACKED)                                                                                 \
    ROW(AFFINE5, 32, 20, UNPACKED)                                                                                 \
    ROW(AFFINE6, 32, 24, UNPACKED)                                                                                 \
    ROW(OCP_MXFP4, 32, 16, UNPACKED)

/* All, in the order of their numbers. */
#define PLLM_FORMATS(ROW)                                                                                          \
    ROW(BF16, 1, 2, UNPACKED)                                                                                      \
    ROW(F32, 1, 4, UNPACKED)                                                                                       \
    PLLM_BLOCK_FORMATS(ROW)                                                                                        \
    ROW(F16, 1, 2, UNPACKED)                                                                                       \
    PLLM_GROUPED_FORMATS(ROW)                                                                                      \
    ROW(BLOCK_FP8, 1, 1, UNPACKED)                                                                                 \
    ROW(GROUPED_NVFP4, 32, 16, 0, 0, 16, 0, 16, FP4_TABLE)

/* Where the other parts of a block begin, in bytes. */
enum {
    Q4_K_SCALES = 4,
    Q5_K_HIGH = 16,
    Q6_K_HIGH = 128, Q6_K_SCALES = 192, Q6_K_SCALE = 208,
    IQ4_XS_HIGH = 2, IQ4_XS_LOW = 4,
    Q2_K_SCALE = 80, Q2_K_MINIMUM = 82,
    Q3_K_SCALES = 96, Q3_K_SCALE = 108,
    IQ3_S_HIGH = 66, IQ3_S_SIGNS = 74, IQ3_S_SCALES = 106,
    IQ3_XXS_SIGNS = 66, /* and scales */
    IQ2_XXS_SIGNS = 6, /* and scales, after the four indices of each 32 values */
    IQ2_XS_SCALES = 66,
    IQ2_S_SIGNS = 34, IQ2_S_HIGH = 66, IQ2_S_SCALES = 74,
    IQ1_S_HIGH = 34, /* and scales */
    IQ1_M_HIGH = 32, IQ1_M_SCALES = 48,
    TQ1_0_HALVES = 32, TQ1_0_LAST = 48, TQ1_0_SCALE = 52,
    TQ2_0_SCALE = 64
};

/* IQ4_NL and IQ4_XS: what a code of four bits stands for. */
#define IQ4_VALUES -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
/* MXFP4: the same, doubled; the scale is halved for it. */
#define FP4_VALUES 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12

#endif
