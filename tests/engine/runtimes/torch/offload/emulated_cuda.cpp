// The kernels of cuda/experts.cu on this machine's processor, thread after thread. Only the last lane of a warp, which
// comes last, may use a sum of its lanes.
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#define __device__
#define __global__

struct Place {
    unsigned x, y, z;
};
static Place threadIdx, blockIdx, blockDim;
static std::vector<float> summands[32];

static float __uint_as_float(unsigned bits) {
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
}

static unsigned __float_as_uint(float number) {
    unsigned bits;
    std::memcpy(&bits, &number, 4);
    return bits;
}

// Added up in pairs, as the lanes of a GPU do.
static float sum_of_lanes(float number) {
    const unsigned lane = threadIdx.x % 32;
    summands[lane].push_back(number);
    if (lane < 31)
        return NAN;
    float sums[32], added[32];
    for (int i = 0; i < 32; i++)
        sums[i] = summands[i][summands[31].size() - 1];
    for (int distance = 16; distance; distance /= 2) {
        for (int i = 0; i < 32; i++)
            added[i] = sums[i] + sums[i ^ distance];
        std::memcpy(sums, added, sizeof sums);
    }
    return sums[31];
}

#define EMULATED
#include "packed_grids.h"
#include "experts.cu"
#include "formats.h"

typedef void (*Caller)(void **);

template <typename Format, typename Input, int TOKENS> void call_products(void **a) {
    products<Format, Input, TOKENS>(
        *(Experts *)a[0], *(Matrix *)a[1], *(Matrix *)a[2], *(const Input **)a[3], *(float **)a[4], *(int *)a[5]
    );
}

template <typename Format, typename Input> void call_routed(void **a) {
    routed<Format, Input>(
        *(const byte *const **)a[0], *(const long long **)a[1], *(Matrix *)a[2], *(Matrix *)a[3],
        *(const Input **)a[4], *(int *)a[5], *(float **)a[6], *(int *)a[7]
    );
}

template <typename Format, typename Output> void call_unpack(void **a) {
    unpack<Format, Output>(*(const byte **)a[0], *(Matrix *)a[1], *(Output **)a[2]);
}

#define KERNELS(name, ...)                                                                                             \
    {"products<" name ", float, 1>", call_products<__VA_ARGS__, float, 1>},                                            \
        {"products<" name ", float, 8>", call_products<__VA_ARGS__, float, 8>},                                        \
        {"products<" name ", bfloat16, 1>", call_products<__VA_ARGS__, bfloat16, 1>},                                  \
        {"products<" name ", bfloat16, 8>", call_products<__VA_ARGS__, bfloat16, 8>},                                  \
        {"routed<" name ", float>", call_routed<__VA_ARGS__, float>},                                                  \
        {"routed<" name ", bfloat16>", call_routed<__VA_ARGS__, bfloat16>},                                            \
        {"unpack<" name ", float>", call_unpack<__VA_ARGS__, float>},                                                  \
        {"unpack<" name ", bfloat16>", call_unpack<__VA_ARGS__, bfloat16>}
#define WHOLE(format) KERNELS(#format, format)
#define BLOCKS(format, ...) KERNELS("Blocks<" #format ">", Blocks<format>),

static const std::map<std::string, Caller> kernels = {
    WHOLE(F32), WHOLE(BF16), WHOLE(F16), WHOLE(OCP_MXFP4), WHOLE(GROUPED_NVFP4), WHOLE(BLOCK_FP8), WHOLE(AFFINE2),
    WHOLE(AFFINE3), WHOLE(AFFINE4), WHOLE(AFFINE5), WHOLE(AFFINE6), WHOLE(AFFINE8),
    PLLM_BLOCK_FORMATS(BLOCKS)
};

// Whether there is a kernel of that name.
extern "C" int there_is(const char *kernel) { return kernels.count(kernel); }

extern "C" void launch(const char *kernel, unsigned x, unsigned y, unsigned z, unsigned threads, void **arguments) {
    const Caller call = kernels.at(kernel);
    blockDim = {threads, 1, 1};
    for (unsigned block = 0; block < x * y * z; block++)
        for (unsigned thread = 0; thread < threads; thread++) {
            if (thread % 32 == 0)
                for (std::vector<float> &each : summands)
                    each.clear();
            blockIdx = {block % x, block / x % y, block / x / y};
            threadIdx = {thread, 0, 0};
            call(arguments);
        }
}
