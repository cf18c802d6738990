// Matrix products of a few rows with a large packed weight, in float32: y = x w^T + bias + residual.
//
// A library's general product reads a weight that lies as the checkpoint has it; with a handful of rows it spends its
// time on rearranging it. Here the weight was rearranged once: panels of 16 outputs, inputs running over the panel.
// Each output is one sum over the inputs in order, so neither other rows nor the number of threads changes a bit.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../native/team.h"

extern "C" {

// Mirrored field by field in packed.py. Strides count elements; the innermost stride is 1.
struct LinearArgs {
    const float *inputs, *weight, *bias, *residual;  // bias and residual may be null
    float* outputs;                                  // [num_rows, num_outputs], contiguous like the residual
    int64_t num_rows, num_inputs, num_outputs, input_stride, num_threads;
    ParallelRegion parallel_region;  // null: threads of our own
};
}

namespace {

constexpr int kPanel = 16;  // outputs side by side in the packed weight
#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kMaxRows = 12;
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kMaxRows = 6;
#else
constexpr int kLanes = 4;
constexpr int kMaxRows = 4;
#endif
constexpr int kVectors = kPanel / kLanes;
constexpr int64_t kRowsPerPass = 96;             // inputs that stay in the second-level cache beside a panel
constexpr int64_t kProductsPerThread = 1 << 17;  // about 10 us; less is done sooner than another thread wakes up

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(4)));

// Give kRows rows of kPanels panels. More panels at once for fewer rows: sums must overlap to hide their latency.
template <int kRows, int kPanels>
void compute_tile(const LinearArgs& a, int64_t row, int64_t panel) {
    const float* inputs = a.inputs + row * a.input_stride;
    const float* weight = a.weight + panel * a.num_inputs * kPanel;
    const int64_t panel_size = a.num_inputs * kPanel;
    Vector sums[kRows][kPanels][kVectors] = {};
    for (int64_t k = 0; k < a.num_inputs; ++k) {
        for (int p = 0; p < kPanels; ++p) {
            const Vector* weights = reinterpret_cast<const Vector*>(weight + p * panel_size + k * kPanel);
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kVectors; ++v) sums[r][p][v] += inputs[r * a.input_stride + k] * weights[v];
        }
    }
    for (int p = 0; p < kPanels; ++p) {
        const int64_t first = (panel + p) * kPanel;
        const int64_t count = std::min<int64_t>(kPanel, a.num_outputs - first);
        for (int r = 0; r < kRows; ++r) {
            float result[kPanel];
            std::memcpy(result, sums[r][p], sizeof result);
            const int64_t at = (row + r) * a.num_outputs + first;
            if (a.bias)
                for (int64_t i = 0; i < count; ++i) result[i] += a.bias[first + i];
            if (a.residual)
                for (int64_t i = 0; i < count; ++i) result[i] += a.residual[at + i];
            std::memcpy(a.outputs + at, result, count * sizeof(float));
        }
    }
}

template <int kRows>
void compute_rows(const LinearArgs& a, int64_t row, int64_t panel, int64_t panel_end) {
    constexpr int kTogether = std::max(1, kMaxRows / (2 * kRows));
    for (; panel + kTogether <= panel_end; panel += kTogether) compute_tile<kRows, kTogether>(a, row, panel);
    for (; panel < panel_end; ++panel) compute_tile<kRows, 1>(a, row, panel);
}

template <int kRows>
void compute_rest(const LinearArgs& a, int64_t num_rows, int64_t row, int64_t panel, int64_t panel_end) {
    if (num_rows == kRows) return compute_rows<kRows>(a, row, panel, panel_end);
    if constexpr (kRows > 1) compute_rest<kRows - 1>(a, num_rows, row, panel, panel_end);
}

// A panel serves all rows of a pass while it is in the first-level cache.
void compute_panels(const LinearArgs& a, int64_t panel, int64_t panel_end) {
    for (int64_t begin = 0; begin < a.num_rows; begin += kRowsPerPass) {
        const int64_t end = std::min(begin + kRowsPerPass, a.num_rows);
        // A few rows stream through the weight; many take it one panel at a time.
        const int64_t step = end - begin <= kMaxRows ? panel_end - panel : 1;
        for (int64_t p = panel; p < panel_end; p += step) {
            int64_t row = begin;
            for (; row + kMaxRows <= end; row += kMaxRows) compute_rows<kMaxRows>(a, row, p, p + step);
            if (row < end) compute_rest<kMaxRows>(a, end - row, row, p, p + step);
        }
    }
}

}  // namespace

extern "C" void runnerd_linear(const LinearArgs* args) {
    const LinearArgs& a = *args;
    const int64_t num_panels = (a.num_outputs + kPanel - 1) / kPanel;
    const int64_t products = a.num_rows * a.num_inputs * a.num_outputs;
    const int64_t num_threads = std::min({a.num_threads, num_panels, 1 + products / kProductsPerThread});
    // More parts than threads: one that is late, or shares its core, takes fewer.
    const int64_t part = std::max<int64_t>(1, num_panels / (8 * num_threads));
    const Team team{a.parallel_region, num_threads};
    team.run(num_threads, (num_panels + part - 1) / part, [] { return 0; }, [&](int, int64_t item) {
        compute_panels(a, item * part, std::min((item + 1) * part, num_panels));
    });
}
