// The elementwise kernels of the transformer and of AdamW for CUDA: numpy_kernels.py's, by name.
//
// Compiled at first use, with REAL as float and as double. Kernels named *_rows give every row to
// one block, whose threads walk along it together and add up what each has found; the others give
// every element to one thread. A block may have any power of two of threads up to MAX_THREADS, and
// nothing here needs more than that, so that tests run this very source on a CPU.
//
// Sums are taken in the same order in every run: the same input gives the same bits.

#define MAX_THREADS 1024
typedef long long Index;

// ---- a block's threads together: the sum and the largest of one value of each ----

__device__ REAL block_sum(REAL value, REAL* scratch) {
    scratch[threadIdx.x] = value;
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
        __syncthreads();
    }
    REAL total = scratch[0];
    __syncthreads();  // scratch may be written again
    return total;
}

__device__ REAL block_max(REAL value, REAL* scratch) {
    scratch[threadIdx.x] = value;
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half)
            scratch[threadIdx.x] = max(scratch[threadIdx.x], scratch[threadIdx.x + half]);
        __syncthreads();
    }
    REAL largest = scratch[0];
    __syncthreads();
    return largest;
}

extern "C" {

// y = x (1 + tanh(c (x + 0.044715 x^3))) / 2 and dy/dx, c = sqrt(2/pi). n elements.
__global__ void gelu(const REAL* x, REAL* y, REAL* slope, Index n) {
    const REAL scale = 0.79788456080286535588, cube = 0.044715;
    Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    REAL value = x[i], squared = value * value;
    REAL t = tanh(scale * value * (1 + cube * squared));
    REAL half = (1 + t) / 2;
    y[i] = value * half;
    slope[i] = half + value / 2 * (1 - t * t) * scale * (1 + 3 * cube * squared);
}

// normalised = (x - mean) * scale, scale = 1 / sqrt(variance + epsilon), y = normalised w + b.
// x, normalised, y : (rows, h); scale : (rows); weight, bias : (h).
__global__ void layer_norm_rows(const REAL* x, const REAL* weight, const REAL* bias, REAL* y,
                                REAL* normalised, REAL* scale, Index h, double epsilon) {
    __shared__ REAL scratch[MAX_THREADS];
    Index row = blockIdx.x * h;
    REAL sum = 0;
    for (Index i = threadIdx.x; i < h; i += blockDim.x) sum += x[row + i];
    REAL mean = block_sum(sum, scratch) / h;
    REAL squares = 0;
    for (Index i = threadIdx.x; i < h; i += blockDim.x)
        squares += (x[row + i] - mean) * (x[row + i] - mean);
    REAL factor = 1 / sqrt(block_sum(squares, scratch) / h + (REAL)epsilon);
    for (Index i = threadIdx.x; i < h; i += blockDim.x) {
        REAL value = (x[row + i] - mean) * factor;
        normalised[row + i] = value;
        y[row + i] = value * weight[i] + bias[i];
    }
    if (threadIdx.x == 0) scale[blockIdx.x] = factor;
}

// dx = (dy w - mean(dy w) - normalised mean(dy w normalised)) scale.
__global__ void layer_norm_backward_rows(const REAL* dy, const REAL* weight, const REAL* normalised,
                                         const REAL* scale, REAL* dx, Index h) {
    __shared__ REAL scratch[MAX_THREADS];
    Index row = blockIdx.x * h;
    REAL sum = 0, along = 0;
    for (Index i = threadIdx.x; i < h; i += blockDim.x) {
        REAL value = dy[row + i] * weight[i];
        sum += value;
        along += value * normalised[row + i];
    }
    REAL mean = block_sum(sum, scratch) / h;
    REAL mean_along = block_sum(along, scratch) / h;
    for (Index i = threadIdx.x; i < h; i += blockDim.x)
        dx[row + i] = (dy[row + i] * weight[i] - mean - normalised[row + i] * mean_along)
                      * scale[blockIdx.x];
}

// Sums over rows of dy normalised and of dy, for some of the rows: block (part, columns) of a grid
// that is `column_blocks` wide adds up rows part, part + parts, ..; the caller adds up the parts.
// dweight, dbias : (parts, h).
__global__ void layer_norm_weights(const REAL* dy, const REAL* normalised, REAL* dweight,
                                   REAL* dbias, Index rows, Index h, Index parts,
                                   Index column_blocks) {
    Index part = blockIdx.x / column_blocks;
    Index column = (blockIdx.x % column_blocks) * blockDim.x + threadIdx.x;
    if (column >= h) return;
    REAL weight = 0, bias = 0;
    for (Index row = part; row < rows; row += parts) {
        REAL value = dy[row * h + column];
        weight += value * normalised[row * h + column];
        bias += value;
    }
    dweight[part * h + column] = weight;
    dbias[part * h + column] = bias;
}

// Row q of a (s, s) matrix of scores becomes softmax(scale * row) over keys 0 to q, zero behind.
__global__ void causal_softmax_rows(REAL* scores, Index s, double factor) {
    __shared__ REAL scratch[MAX_THREADS];
    Index query = blockIdx.x % s;
    REAL* row = scores + (Index)blockIdx.x * s;
    const REAL scale = factor;
    REAL largest = row[0] * scale;
    for (Index key = threadIdx.x; key <= query; key += blockDim.x)
        largest = max(largest, row[key] * scale);
    largest = block_max(largest, scratch);
    REAL sum = 0;
    for (Index key = threadIdx.x; key <= query; key += blockDim.x) {
        REAL value = exp(row[key] * scale - largest);
        row[key] = value;
        sum += value;
    }
    REAL total = block_sum(sum, scratch);
    for (Index key = threadIdx.x; key < s; key += blockDim.x)
        row[key] = key <= query ? row[key] / total : 0;
}

// dp becomes p (dp - sum(dp p)) scale over keys 0 to q, zero behind.
__global__ void causal_softmax_backward_rows(REAL* dp, const REAL* p, Index s, double scale) {
    __shared__ REAL scratch[MAX_THREADS];
    Index query = blockIdx.x % s, row = (Index)blockIdx.x * s;
    REAL sum = 0;
    for (Index key = threadIdx.x; key <= query; key += blockDim.x)
        sum += dp[row + key] * p[row + key];
    REAL along = block_sum(sum, scratch);
    for (Index key = threadIdx.x; key < s; key += blockDim.x)
        dp[row + key] = key <= query ? (dp[row + key] - along) * p[row + key] * (REAL)scale : 0;
}

// target[rows[order[i]]] += values[order[i]], where `order` sorts the rows: block b takes the
// entries starts[b] to starts[b+1] of the order, which have one row in common, one after another.
__global__ void add_runs(REAL* target, const Index* rows, const REAL* values, const Index* order,
                         const Index* starts, Index runs, Index n, Index h) {
    Index start = starts[blockIdx.x];
    Index end = (Index)blockIdx.x + 1 < runs ? starts[blockIdx.x + 1] : n;
    for (Index column = threadIdx.x; column < h; column += blockDim.x) {
        REAL sum = 0;
        for (Index i = start; i < end; i++) sum += values[order[i] * h + column];
        target[rows[order[start]] * h + column] += sum;
    }
}

// One AdamW step; correct_* are 1 - beta^step, keep is 1 - lr decay. n elements.
__global__ void adamw(REAL* weight, const REAL* gradient, REAL* first, REAL* second, Index n,
                      double lr, double beta1, double beta2, double epsilon, double keep,
                      double correct_first, double correct_second, double gradient_scale) {
    Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    REAL g = gradient[i] * (REAL)gradient_scale;
    REAL m = (REAL)beta1 * first[i] + (REAL)(1 - beta1) * g;
    REAL v = (REAL)beta2 * second[i] + (REAL)(1 - beta2) * g * g;
    first[i] = m;
    second[i] = v;
    REAL step = m / (sqrt(v / (REAL)correct_second) + (REAL)epsilon);
    weight[i] = weight[i] * (REAL)keep - (REAL)(lr / correct_first) * step;
}

// sums[block] = the squares of its elements, in double: block b takes b, b + blocks, ..
__global__ void square_sums(const REAL* x, double* sums, Index n, Index blocks) {
    __shared__ double scratch[MAX_THREADS];
    double sum = 0;
    for (Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blocks * blockDim.x)
        sum += (double)x[i] * (double)x[i];
    scratch[threadIdx.x] = sum;
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = scratch[0];
}

}  // extern "C"
