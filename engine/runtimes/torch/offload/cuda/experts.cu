// Packed experts on an NVIDIA GPU, from the bytes as they lie in their slots.
//
// products<Format, Input, TOKENS>: a matrix of several experts times their tokens, for few tokens each. A warp makes
// ROWS rows of the result: its lanes decode eight numbers at a time and multiply them with up to TOKENS tokens. What a
// token's result is made of, and in which order, depends on nothing but the matrix: not on the tokens or experts beside
// it.
//
// routed<Format, Input>: the same for single tokens whose experts the host does not know.
//
// unpack<Format, Output>: a whole matrix as numbers, for a product of many tokens.
//
// The layouts of blocks are ggml's; see engine/models/formats/number_formats.py. Decoding rounds as torch_unpacking.py does, so
// this is compiled without contracting products and sums; where they may be, fmaf says so. The compiler in torch's packages
// comes without headers; the only one that is needed, the native kernels' packed_grids.h, is put before this.

typedef unsigned char byte;
typedef unsigned short half_word;
typedef unsigned word;

#define WARP 32
#define WARPS 4
#define ROWS 4
#define PIECE 8
#define EACH_NUMBER _Pragma("unroll") for (int i = 0; i < PIECE; i++)
#define MOST_EXPERTS 64

struct Experts {
    const byte *slot[MOST_EXPERTS];
    int first[MOST_EXPERTS];
    int count[MOST_EXPERTS];
};

// A matrix in every slot. Offsets are in bytes from the slot's beginning, -1 for what there is not. `group` numbers
// share a scale of the kind `scale_kind`, and `scales_row` scales make a row.
struct Matrix {
    long long codes, scales, biases, addend;
    long long row_bytes;
    int rows, columns;
    int group, scales_row, scale_kind, addend_kind;
};

enum { FLOAT32, BFLOAT16, FLOAT16, EXPONENT };

__device__ inline float as_float(unsigned bits) { return __uint_as_float(bits); }

// Eight bytes.
struct Bytes {
    word part[2];
    __device__ unsigned operator[](int i) const { return part[i / 4] >> 8 * (i & 3) & 255; }
};

// Reads from addresses that are multiples of ALIGNMENT, with as few loads as that allows.
template <int ALIGNMENT> struct Memory;

template <> struct Memory<1> {
    static __device__ unsigned pair(const byte *at) { return at[0] | at[1] << 8; }
    static __device__ Bytes eight(const byte *at) {
        Bytes found;
        for (int i = 0; i < 2; i++) found.part[i] = pair(at + 4 * i) | (word)pair(at + 4 * i + 2) << 16;
        return found;
    }
};

template <> struct Memory<2> {
    static __device__ unsigned pair(const byte *at) { return *(const half_word *)at; }
    static __device__ Bytes eight(const byte *at) {
        Bytes found;
        for (int i = 0; i < 2; i++) found.part[i] = pair(at + 4 * i) | (word)pair(at + 4 * i + 2) << 16;
        return found;
    }
};

template <> struct Memory<4> {
    static __device__ unsigned pair(const byte *at) { return *(const half_word *)at; }
    static __device__ Bytes eight(const byte *at) {
        Bytes found;
        for (int i = 0; i < 2; i++) found.part[i] = ((const word *)at)[i];
        return found;
    }
};

__device__ inline float half_of(unsigned bits) {
    unsigned exponent = bits >> 10 & 31, fraction = bits & 1023, sign = (bits & 0x8000) << 16;
    if (exponent == 31)
        return as_float(sign | 0x7F800000 | fraction << 13);
    if (exponent)
        return as_float(sign | (exponent + 112) << 23 | fraction << 13);
    float small = (float)fraction * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -small : small;
}

// Half of a power of two, as the codes of MXFP4 stand for twice their values.
__device__ inline float half_power(unsigned exponent) {
    return as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
}

// Scales, biases: from any address.
__device__ inline float number_at(const byte *at, int kind, long long index) {
    typedef Memory<1> Any;
    switch (kind) {
    case FLOAT32: return as_float(Any::pair(at + 4 * index) | (word)Any::pair(at + 4 * index + 2) << 16);
    case BFLOAT16: return as_float((word)Any::pair(at + 2 * index) << 16);
    case FLOAT16: return half_of(Any::pair(at + 2 * index));
    default: return half_power(at[index]);
    }
}

__device__ inline float e4m3(unsigned bits) {
    unsigned exponent = bits >> 3 & 15, fraction = bits & 7, sign = (bits & 128) << 24;
    if ((bits & 127) == 127)
        return as_float(sign | 0x7FC00000);
    if (exponent)
        return as_float(sign | (exponent + 120) << 23 | fraction << 20);
    float small = (float)fraction * 0.001953125f;  // 2^-9
    return sign ? -small : small;
}

__device__ inline float doubled_fp4(unsigned code) {
    // Twice the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6, four bits each.
    float magnitude = (float)(0xC8643210u >> 4 * (code & 7) & 15);
    return code & 8 ? 0.0f - magnitude : magnitude;
}

__device__ inline float iq4(unsigned code) {
    const int values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return (float)values[code];
}

// --- blocks of 32 numbers: `piece` is 0 to 3, the low halves of all bytes come first ---------------------------------

// The codes of four bits of a piece. `codes` are the 16 bytes of a block that hold them.
template <int ALIGNMENT> struct Halves {
    Bytes bytes;
    int shift;
    __device__ Halves(const byte *codes, int piece)
        : bytes(Memory<ALIGNMENT>::eight(codes + 8 * (piece & 1))), shift(4 * (piece >> 1)) {}
    __device__ unsigned operator[](int i) const { return bytes[i] >> shift & 15; }
};

__device__ inline unsigned fifth_bit(const byte *bits, int piece, int i) { return (bits[piece] >> i & 1) << 4; }

struct Q4_0 {
    enum { NUMBERS = 32, BYTES = 18, ALIGNMENT = 2 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const float scale = half_of(Memory<2>::pair(block));
        const Halves<2> codes(block + 2, piece);
        EACH_NUMBER out[i] = scale * (float)((int)codes[i] - 8);
    }
};

struct Q4_1 {
    enum { NUMBERS = 32, BYTES = 20, ALIGNMENT = 4 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const float scale = half_of(Memory<4>::pair(block)), least = half_of(Memory<4>::pair(block + 2));
        const Halves<4> codes(block + 4, piece);
        EACH_NUMBER out[i] = scale * (float)codes[i] + least;
    }
};

struct Q5_0 {
    enum { NUMBERS = 32, BYTES = 22, ALIGNMENT = 2 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const float scale = half_of(Memory<2>::pair(block));
        const Halves<2> codes(block + 6, piece);
        EACH_NUMBER
            out[i] = scale * (float)((int)(codes[i] | fifth_bit(block + 2, piece, i)) - 16);
    }
};

struct Q5_1 {
    enum { NUMBERS = 32, BYTES = 24, ALIGNMENT = 4 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const float scale = half_of(Memory<4>::pair(block)), least = half_of(Memory<4>::pair(block + 2));
        const Halves<4> codes(block + 8, piece);
        EACH_NUMBER out[i] = scale * (float)(codes[i] | fifth_bit(block + 4, piece, i)) + least;
    }
};

struct Q8_0 {
    enum { NUMBERS = 32, BYTES = 34, ALIGNMENT = 2 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const float scale = half_of(Memory<2>::pair(block));
        const Bytes codes = Memory<2>::eight(block + 2 + PIECE * piece);
        EACH_NUMBER out[i] = (float)(signed char)codes[i] * scale;
    }
};

struct IQ4_NL {
    enum { NUMBERS = 32, BYTES = 18, ALIGNMENT = 2 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const float scale = half_of(Memory<2>::pair(block));
        const Halves<2> codes(block + 2, piece);
        EACH_NUMBER out[i] = scale * iq4(codes[i]);
    }
};

struct MXFP4 {
    enum { NUMBERS = 32, BYTES = 17, ALIGNMENT = 1 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const float scale = half_power(block[0]);
        const Halves<1> codes(block + 1, piece);
        EACH_NUMBER out[i] = scale * doubled_fp4(codes[i]);
    }
};

// --- blocks of 256 numbers: `piece` is 0 to 31 -----------------------------------------------------------------------

// The scale and the minimum of the group of 32 numbers that `piece` is in, six bits each.
__device__ inline void scale_and_minimum(const byte *block, int piece, float *scale, float *minimum) {
    const byte *packed = block + 4;
    const int group = piece / 4, low = group & 3;
    const unsigned a = packed[low], b = packed[4 + low], both = packed[8 + low];
    const unsigned first = group < 4 ? a & 63 : (both & 15) | (a >> 2 & 48);
    const unsigned second = group < 4 ? b & 63 : both >> 4 | (b >> 2 & 48);
    *scale = half_of(Memory<4>::pair(block)) * (float)first;
    *minimum = half_of(Memory<4>::pair(block + 2)) * (float)second;
}

// The codes of four bits of a piece: of each 32 bytes first the low halves, then the high ones.
struct HalvesOf32 {
    Bytes bytes;
    int shift;
    __device__ HalvesOf32(const byte *codes, int piece)
        : bytes(Memory<4>::eight(codes + 32 * (piece / 8) + 8 * (piece & 3))), shift(4 * (piece >> 2 & 1)) {}
    __device__ unsigned operator[](int i) const { return bytes[i] >> shift & 15; }
};

struct Q4_K {
    enum { NUMBERS = 256, BYTES = 144, ALIGNMENT = 4 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        float scale, minimum;
        scale_and_minimum(block, piece, &scale, &minimum);
        const HalvesOf32 codes(block + 16, piece);
        EACH_NUMBER out[i] = scale * (float)codes[i] - minimum;
    }
};

struct Q5_K {
    enum { NUMBERS = 256, BYTES = 176, ALIGNMENT = 4 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        float scale, minimum;
        scale_and_minimum(block, piece, &scale, &minimum);
        const HalvesOf32 codes(block + 48, piece);
        const Bytes high = Memory<4>::eight(block + 16 + 8 * (piece & 3));
        EACH_NUMBER
            out[i] = scale * (float)(codes[i] | (high[i] >> (piece >> 2) & 1) << 4) - minimum;
    }
};

struct Q6_K {
    enum { NUMBERS = 256, BYTES = 210, ALIGNMENT = 2 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const float scale = half_of(Memory<2>::pair(block + 208)) * (float)(signed char)block[192 + piece / 2];
        const int half = piece >> 4, quarter = piece >> 2 & 3, at = 8 * (piece & 3);
        const Bytes low = Memory<2>::eight(block + 64 * half + 32 * (quarter & 1) + at);
        const Bytes high = Memory<2>::eight(block + 128 + 32 * half + at);
        EACH_NUMBER {
            unsigned code = (low[i] >> 4 * (quarter >> 1) & 15) | (high[i] >> 2 * quarter & 3) << 4;
            out[i] = scale * (float)((int)code - 32);
        }
    }
};

struct IQ4_XS {
    enum { NUMBERS = 256, BYTES = 136, ALIGNMENT = 4 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const int group = piece / 4;
        const unsigned low = block[4 + group / 2] >> 4 * (group & 1) & 15;
        const unsigned high = Memory<4>::pair(block + 2) >> 2 * group & 3;
        const float scale = half_of(Memory<4>::pair(block)) * (float)((int)(low | high << 4) - 32);
        const Halves<4> codes(block + 8 + 16 * group, piece & 3);
        EACH_NUMBER out[i] = scale * iq4(codes[i]);
    }
};

// The codes of two bits of a piece: of each 32 bytes first the lowest ones.
struct TwosOf32 {
    Bytes bytes;
    int shift;
    template <int ALIGNMENT> __device__ TwosOf32(Memory<ALIGNMENT>, const byte *codes, int piece)
        : bytes(Memory<ALIGNMENT>::eight(codes + 32 * (piece / 16) + 8 * (piece & 3))), shift(2 * (piece >> 2 & 3)) {}
    __device__ unsigned operator[](int i) const { return bytes[i] >> shift & 3; }
};

struct Q2_K {
    enum { NUMBERS = 256, BYTES = 84, ALIGNMENT = 4 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const unsigned own = block[piece / 2];
        const float scale = half_of(Memory<4>::pair(block + 80)) * (float)(own & 15);
        const float minimum = half_of(Memory<4>::pair(block + 82)) * (float)(own >> 4);
        const TwosOf32 codes(Memory<4>(), block + 16, piece);
        EACH_NUMBER out[i] = scale * (float)codes[i] - minimum;
    }
};

struct Q3_K {
    enum { NUMBERS = 256, BYTES = 110, ALIGNMENT = 2 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const byte *packed = block + 96;
        const int group = piece / 2;
        const unsigned low = packed[group & 7] >> 4 * (group / 8) & 15, high = packed[8 + (group & 3)] >> 2 * (group / 4) & 3;
        const float scale = half_of(Memory<2>::pair(block + 108)) * (float)((int)(low | high << 4) - 32);
        const TwosOf32 codes(Memory<2>(), block + 32, piece);
        const Bytes third = Memory<2>::eight(block + 8 * (piece & 3));
        EACH_NUMBER
            out[i] = scale * (float)((int)(codes[i] | (third[i] >> piece / 4 & 1) << 2) - 4);
    }
};

// Points of grids: the first value in the lowest byte.
__device__ const word iq3_s_grid[512] = {IQ3_S_GRID(IQ3_S_FIRST) IQ3_S_GRID(IQ3_S_SECOND)};
__device__ const word iq3_xxs_grid[256] = {IQ3_XXS_GRID(IQ3_XXS_POINT)};
__device__ const unsigned long long iq2_xxs_grid[256] = {IQ2_XXS_GRID(IQ2_POINT)};
__device__ const unsigned long long iq2_xs_grid[512] = {IQ2_XS_GRID(IQ2_POINT)};
__device__ const unsigned long long iq2_s_grid[1024] = {IQ2_S_GRID(IQ2_POINT)};
__device__ const unsigned long long iq1_grid[2048] = {IQ1_S_GRID(IQ1_POINT)};

__device__ inline Bytes bytes_of(unsigned long long point) {
    Bytes found;
    found.part[0] = (word)point;
    found.part[1] = (word)(point >> 32);
    return found;
}

// Seven signs, and an eighth that makes the number of negative ones even.
__device__ inline unsigned even_signs(unsigned signs) {
    const unsigned folded = signs ^ signs >> 4;
    return signs | (0x6996 >> (folded & 15) & 1) << 7;
}

// A word of two pairs.
__device__ inline word two_pairs(const byte *at) { return Memory<2>::pair(at) | (word)Memory<2>::pair(at + 2) << 16; }

// The scales of codes that are multiples of a part: one more than twice as much, times that part.
__device__ inline float odd_scale(unsigned half, unsigned bits, float part) {
    return half_of(half) * part * (float)(1 + 2 * bits);
}

// A piece of sizes, times the scale, with the signs of a byte.
__device__ inline void with_signs(const Bytes &sizes, float scale, unsigned signs, float *out) {
    EACH_NUMBER {
        const float size = (float)sizes[i];
        out[i] = scale * (signs >> i & 1 ? -size : size);
    }
}

struct IQ3_S {
    enum { NUMBERS = 256, BYTES = 110, ALIGNMENT = 2 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const int group = piece / 4;
        const float scale = half_of(Memory<2>::pair(block)) * (float)(1 + 2 * (block[106 + group / 2] >> 4 * (group & 1) & 15));
        const unsigned low = Memory<2>::pair(block + 2 + 2 * piece), high = block[66 + group] >> 2 * (piece & 3);
        Bytes sizes;
        sizes.part[0] = iq3_s_grid[(low & 255) | (high << 8 & 256)];
        sizes.part[1] = iq3_s_grid[low >> 8 | (high << 7 & 256)];
        with_signs(sizes, scale, block[74 + piece], out);
    }
};

struct IQ3_XXS {
    enum { NUMBERS = 256, BYTES = 98, ALIGNMENT = 2 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const word packed = two_pairs(block + 66 + 4 * (piece / 4));
        const unsigned places = Memory<2>::pair(block + 2 + 2 * piece);
        Bytes sizes;
        sizes.part[0] = iq3_xxs_grid[places & 255];
        sizes.part[1] = iq3_xxs_grid[places >> 8];
        const float scale = odd_scale(Memory<2>::pair(block), packed >> 28, 0.5f);
        with_signs(sizes, scale, even_signs(packed >> 7 * (piece & 3) & 127), out);
    }
};

struct IQ2_XXS {
    enum { NUMBERS = 256, BYTES = 66, ALIGNMENT = 2 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const byte *group = block + 2 + 8 * (piece / 4);
        const word packed = two_pairs(group + 4);
        const float scale = odd_scale(Memory<2>::pair(block), packed >> 28, 0.125f);
        const Bytes sizes = bytes_of(iq2_xxs_grid[group[piece & 3]]);
        with_signs(sizes, scale, even_signs(packed >> 7 * (piece & 3) & 127), out);
    }
};

struct IQ2_XS {
    enum { NUMBERS = 256, BYTES = 74, ALIGNMENT = 2 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const unsigned packed = Memory<2>::pair(block + 2 + 2 * piece);
        const float scale = odd_scale(Memory<2>::pair(block), block[66 + piece / 4] >> 4 * (piece / 2 & 1) & 15, 0.125f);
        with_signs(bytes_of(iq2_xs_grid[packed & 511]), scale, even_signs(packed >> 9), out);
    }
};

struct IQ2_S {
    enum { NUMBERS = 256, BYTES = 82, ALIGNMENT = 2 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const unsigned high = block[66 + piece / 4] >> 2 * (piece & 3) & 3;
        const float scale = odd_scale(Memory<2>::pair(block), block[74 + piece / 4] >> 4 * (piece / 2 & 1) & 15, 0.125f);
        with_signs(bytes_of(iq2_s_grid[block[2 + piece] | high << 8]), scale, block[34 + piece], out);
    }
};

// Points of the 1-bit formats, an eighth above or below them. Codes are eight times as large, and 16 are added.
__device__ inline void moved(unsigned place, float scale, bool below, float *out) {
    const Bytes point = bytes_of(iq1_grid[place]);
    EACH_NUMBER out[i] = scale * (float)((int)point[i] - 16 - (below ? 2 : 0));
}

struct IQ1_S {
    enum { NUMBERS = 256, BYTES = 50, ALIGNMENT = 2 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const unsigned high = Memory<2>::pair(block + 34 + 2 * (piece / 4));
        const float scale = odd_scale(Memory<2>::pair(block), high >> 12 & 7, 0.125f);
        moved(block[2 + piece] | (high >> 3 * (piece & 3) & 7) << 8, scale, high >> 15, out);
    }
};

struct IQ1_M {
    enum { NUMBERS = 256, BYTES = 56, ALIGNMENT = 4 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        unsigned half = 0;
        for (int i = 0; i < 4; i++) half |= Memory<4>::pair(block + 48 + 2 * i) >> 12 << 4 * i;
        const unsigned bits = Memory<4>::pair(block + 48 + 2 * (piece / 8)) >> 3 * (piece / 2 & 3) & 7;
        const unsigned high = block[32 + piece / 2] >> 4 * (piece & 1) & 15;
        moved(block[piece] | (high & 7) << 8, odd_scale(half, bits, 0.125f), high >> 3, out);
    }
};

struct TQ1_0 {
    enum { NUMBERS = 256, BYTES = 54, ALIGNMENT = 2 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const float scale = half_of(Memory<2>::pair(block + 52));
        const int powers[5] = {1, 3, 9, 27, 81};
        EACH_NUMBER {
            const int at = PIECE * piece + i, later = at - 160, last = at - 240;
            const int place = at < 160 ? at % 32 : at < 240 ? 32 + later % 16 : 48 + last % 4;
            const int power = powers[at < 160 ? at / 32 : at < 240 ? later / 16 : last / 4];
            out[i] = scale * (float)(((block[place] * power & 255) * 3 >> 8) - 1);
        }
    }
};

struct TQ2_0 {
    enum { NUMBERS = 256, BYTES = 66, ALIGNMENT = 2 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const float scale = half_of(Memory<2>::pair(block + 64));
        const TwosOf32 codes(Memory<2>(), block, piece);
        EACH_NUMBER out[i] = scale * (float)((int)codes[i] - 1);
    }
};

// --- blocks of 64 and 128 numbers ------------------------------------------------------------------------------------

struct NVFP4 {
    enum { NUMBERS = 64, BYTES = 36, ALIGNMENT = 4 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const unsigned own = block[piece / 2];
        // Half of an unsigned FP8 number, whose exponents half precision has, too.
        const float scale = half_of(own == 0x7F ? 0 : (own & 0x7F) << 7) * 128.0f;
        const Bytes codes = Memory<4>::eight(block + 4 + 8 * (piece / 2));
        EACH_NUMBER out[i] = scale * doubled_fp4(codes[i] >> 4 * (piece & 1) & 15);
    }
};

struct Q1_0 {
    enum { NUMBERS = 128, BYTES = 18, ALIGNMENT = 2 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const float scale = half_of(Memory<2>::pair(block));
        EACH_NUMBER out[i] = block[2 + piece] >> i & 1 ? scale : -scale;
    }
};

struct Q2_0 {
    enum { NUMBERS = 64, BYTES = 18, ALIGNMENT = 2 };
    static __device__ void decode(const byte *block, int piece, float *out) {
        const float scale = half_of(Memory<2>::pair(block));
        const unsigned codes = Memory<2>::pair(block + 2 + 2 * piece);
        EACH_NUMBER out[i] = scale * (float)((int)(codes >> 2 * i & 3) - 1);
    }
};

// --- whole formats: `decode` makes the numbers 8 * piece to 8 * piece + 7 of a row -----------------------------------

template <typename Block> struct Blocks {
    static __device__ void decode(const byte *slot, const Matrix &matrix, int row, int piece, float *out) {
        const int pieces = Block::NUMBERS / PIECE;
        const byte *codes = slot + matrix.codes + row * matrix.row_bytes;
        Block::decode(codes + (long long)(piece / pieces) * Block::BYTES, piece % pieces, out);
    }
};

struct F32 {
    static __device__ void decode(const byte *slot, const Matrix &matrix, int row, int piece, float *out) {
        const byte *at = slot + matrix.codes + row * matrix.row_bytes + (long long)4 * PIECE * piece;
        EACH_NUMBER out[i] = ((const float *)at)[i];
    }
};

// Numbers of two bytes: a pair in a word.
template <int KIND> struct TwoBytes {
    static __device__ void decode(const byte *slot, const Matrix &matrix, int row, int piece, float *out) {
        const byte *at = slot + matrix.codes + row * matrix.row_bytes + (long long)2 * PIECE * piece;
        EACH_NUMBER {
            const word bits = ((const word *)at)[i / 2] >> 16 * (i & 1) & 0xFFFF;
            out[i] = KIND == BFLOAT16 ? as_float(bits << 16) : half_of(bits);
        }
    }
};

typedef TwoBytes<BFLOAT16> BF16;
typedef TwoBytes<FLOAT16> F16;

struct Grouped {
    static __device__ long long place(const Matrix &matrix, int row, int piece) {
        return (long long)row * matrix.scales_row + PIECE * piece / matrix.group;
    }
};

// Codes of a piece that lie one after the other, the first in the lowest bits of a byte. Pieces are words where codes have
// four or eight bits, and else as many bytes as these have bits.
template <int BITS> struct Codes {
    unsigned long long all;
    __device__ Codes(const byte *at) {
        all = 0;
        if (BITS % 4 == 0)
            for (int i = 0; i < BITS / 4; i++) all |= (unsigned long long)((const word *)at)[i] << 32 * i;
        else
            for (int i = 0; i < BITS; i++) all |= (unsigned long long)at[i] << 8 * i;
    }
    __device__ unsigned operator[](int i) const { return (unsigned)(all >> BITS * i) & ((1 << BITS) - 1); }
};

template <int BITS> struct Affine {
    static __device__ void decode(const byte *slot, const Matrix &matrix, int row, int piece, float *out) {
        const byte *at = slot + matrix.codes + row * matrix.row_bytes + BITS * piece;
        const long long place = Grouped::place(matrix, row, piece);
        const float scale = number_at(slot + matrix.scales, matrix.scale_kind, place);
        const float bias = number_at(slot + matrix.biases, matrix.scale_kind, place);
        const Codes<BITS> codes(at);
        EACH_NUMBER out[i] = scale * (float)codes[i] + bias;
    }
};

typedef Affine<2> AFFINE2;
typedef Affine<3> AFFINE3;
typedef Affine<4> AFFINE4;
typedef Affine<5> AFFINE5;
typedef Affine<6> AFFINE6;
typedef Affine<8> AFFINE8;

struct OCP_MXFP4 {
    static __device__ void decode(const byte *slot, const Matrix &matrix, int row, int piece, float *out) {
        const Codes<4> codes(slot + matrix.codes + row * matrix.row_bytes + 4 * piece);
        const float scale = half_power(slot[matrix.scales + Grouped::place(matrix, row, piece)]);
        EACH_NUMBER out[i] = scale * doubled_fp4(codes[i]);
    }
};

// What half of each of the 256 scales stands for is a table of the matrix.
struct GROUPED_NVFP4 {
    static __device__ void decode(const byte *slot, const Matrix &matrix, int row, int piece, float *out) {
        const Codes<4> codes(slot + matrix.codes + row * matrix.row_bytes + 4 * piece);
        const int own = slot[matrix.scales + Grouped::place(matrix, row, piece)];
        const float scale = number_at(slot + matrix.biases, FLOAT32, own);
        EACH_NUMBER out[i] = scale * doubled_fp4(codes[i]);
    }
};

struct BLOCK_FP8 {
    static __device__ void decode(const byte *slot, const Matrix &matrix, int row, int piece, float *out) {
        const Codes<8> codes(slot + matrix.codes + row * matrix.row_bytes + PIECE * piece);
        // One for a block, or for a row (group 1), or for all (group 0).
        const long long place =
            matrix.group > 1 ? Grouped::place(matrix, row / matrix.group, piece) : (long long)row * matrix.group;
        const float scale = number_at(slot + matrix.scales, matrix.scale_kind, place);
        EACH_NUMBER out[i] = e4m3(codes[i]) * scale;
    }
};

// --- the kernels -----------------------------------------------------------------------------------------------------

struct bfloat16 {
    half_word bits;
};

struct alignas(16) FourWords {
    word part[4];
};

// Eight numbers of a token from an address that is a multiple of 16 bytes.
__device__ inline void load_piece(const float *at, float *out) {
    for (int part = 0; part < 2; part++) {
        FourWords words = ((const FourWords *)at)[part];
        for (int i = 0; i < 4; i++) out[4 * part + i] = as_float(words.part[i]);
    }
}

__device__ inline void load_piece(const bfloat16 *at, float *out) {
    FourWords words = *(const FourWords *)at;
    for (int i = 0; i < 4; i++) {
        out[2 * i] = as_float(words.part[i] << 16);
        out[2 * i + 1] = as_float(words.part[i] & 0xFFFF0000u);
    }
}

#ifndef EMULATED
// The sum of a number of all lanes of a warp.
__device__ inline float sum_of_lanes(float number) {
    for (int distance = WARP / 2; distance; distance /= 2)
        number += __shfl_xor_sync(0xFFFFFFFFu, number, distance);
    return number;
}
#endif

// The rows `row` and following, as many as a warp makes, of `matrix` times `tokens` tokens, at most TOKENS. `output` is
// where the first token's result belongs; those of the others follow after `output_row` numbers each.
template <typename Format, typename Input, int TOKENS>
__device__ inline void multiply(
    const byte *slot, const Matrix &matrix, int row, int tokens, const Input *input, float *output, int output_row
) {
    const int lane = threadIdx.x % WARP, pieces = matrix.columns / PIECE;
    float sums[ROWS][TOKENS] = {};
    for (int piece = lane; piece < pieces; piece += WARP) {
        float weights[ROWS][PIECE];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            Format::decode(slot, matrix, row + r < matrix.rows ? row + r : row, piece, weights[r]);
#pragma unroll
        for (int i = 0; i < TOKENS; i++) {
            if (i < tokens) {
                float numbers[PIECE];
                load_piece(input + (long long)i * matrix.columns + PIECE * piece, numbers);
#pragma unroll
                for (int r = 0; r < ROWS; r++)
#pragma unroll
                    for (int j = 0; j < PIECE; j++) sums[r][i] = fmaf(weights[r][j], numbers[j], sums[r][i]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (row + r < matrix.rows) {
            const float addend =
                matrix.addend < 0 ? 0.0f : number_at(slot + matrix.addend, matrix.addend_kind, row + r);
#pragma unroll
            for (int i = 0; i < TOKENS; i++) {
                if (i < tokens) {
                    const float sum = sum_of_lanes(sums[r][i]);
                    if (lane == WARP - 1)
                        output[(long long)i * output_row + row + r] = sum + addend;
                }
            }
        }
    }
}

__device__ inline int first_row() { return (blockIdx.x * WARPS + threadIdx.x / WARP) * ROWS; }

// Grid: rows of the larger matrix / ROWS / WARPS, experts, matrices. `input` [tokens, columns] and `output` [tokens,
// output_row] have the tokens in the order of the experts; the second matrix's results follow the first's.
template <typename Format, typename Input, int TOKENS>
__global__ void products(
    Experts experts, Matrix first, Matrix second, const Input *input, float *output, int output_row
) {
    const Matrix &matrix = blockIdx.z ? second : first;
    const int row = first_row(), count = experts.count[blockIdx.y];
    if (row >= matrix.rows)
        return;
    for (int start = 0; start < count; start += TOKENS) {
        const long long token = experts.first[blockIdx.y] + start;
        multiply<Format, Input, TOKENS>(
            experts.slot[blockIdx.y], matrix, row, count - start < TOKENS ? count - start : TOKENS,
            input + token * matrix.columns, output + token * output_row + (blockIdx.z ? first.rows : 0), output_row
        );
    }
}

// The same for single routes whose experts only the GPU knows: that of route i is `slots[experts[i]]`, and its token
// is row i / share of `input`. Its result is row i of `output`. Grid: as above, with routes for experts.
template <typename Format, typename Input>
__global__ void routed(
    const byte *const *slots, const long long *experts, Matrix first, Matrix second, const Input *input, int share,
    float *output, int output_row
) {
    const Matrix &matrix = blockIdx.z ? second : first;
    const int row = first_row();
    const long long route = blockIdx.y;
    if (row >= matrix.rows)
        return;
    multiply<Format, Input, 1>(
        slots[experts[route]], matrix, row, 1, input + route / share * matrix.columns,
        output + route * output_row + (blockIdx.z ? first.rows : 0), output_row
    );
}

// Eight numbers to an address that is a multiple of 16 bytes.
__device__ inline void store_piece(float *at, const float *numbers) {
    for (int part = 0; part < 2; part++) {
        FourWords words;
        for (int i = 0; i < 4; i++) words.part[i] = __float_as_uint(numbers[4 * part + i]);
        ((FourWords *)at)[part] = words;
    }
}

__device__ inline word rounded(float number) {
    const word bits = __float_as_uint(number);
    const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    return is_nan ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

__device__ inline void store_piece(bfloat16 *at, const float *numbers) {
    FourWords words;
    for (int i = 0; i < 4; i++) words.part[i] = rounded(numbers[2 * i]) | rounded(numbers[2 * i + 1]) << 16;
    *(FourWords *)at = words;
}

// Grid: enough threads for a piece each. `output` [rows, columns].
template <typename Format, typename Output> __global__ void unpack(const byte *slot, Matrix matrix, Output *output) {
    const long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const int pieces = matrix.columns / PIECE;
    if (index >= (long long)matrix.rows * pieces)
        return;
    float numbers[PIECE];
    Format::decode(slot, matrix, (int)(index / pieces), (int)(index % pieces), numbers);
    store_piece(output + PIECE * index, numbers);
}
