// Kernels with the mistakes that the emulator must find, and the same without. See test_emulator.py.
typedef unsigned u32;
#define KERNEL(name, ...) extern "C" __global__ void name(__VA_ARGS__)

// Every thread leaves a number in shared memory and takes another thread's.
template <class Barrier>
__device__ __forceinline__ void exchange(const u32* in, u32* out, u32 distance, Barrier barrier) {
  __shared__ u32 numbers[128];
  numbers[threadIdx.x] = in[threadIdx.x];
  barrier();
  out[threadIdx.x] = numbers[(threadIdx.x + distance) % 128];
}
struct NoBarrier {
  __device__ void operator()() const {}
};
struct WarpBarrier {
  __device__ void operator()() const { __syncwarp(); }
};
struct BlockBarrier {
  __device__ void operator()() const { __syncthreads(); }
};
// A vote makes lanes wait for one another, but orders no memory.
struct Vote {
  __device__ void operator()() const {
    if (__ballot_sync(~0u, threadIdx.x > 1000)) __syncthreads();
  }
};
KERNEL(exchange_without_barrier, const u32* in, u32* out, u32 distance) { exchange(in, out, distance, NoBarrier{}); }
KERNEL(exchange_with_vote, const u32* in, u32* out, u32 distance) { exchange(in, out, distance, Vote{}); }
KERNEL(exchange_with_warp_barrier, const u32* in, u32* out, u32 distance) { exchange(in, out, distance, WarpBarrier{}); }
KERNEL(exchange_with_block_barrier, const u32* in, u32* out, u32 distance) { exchange(in, out, distance, BlockBarrier{}); }

// The same through global memory.
KERNEL(exchange_in_global_memory, u32* numbers, u32* out, u32 distance) {
  numbers[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = numbers[(threadIdx.x + distance) % 128];
}

// All lanes read a number that one of them may change.
KERNEL(write_after_read, u32* numbers, u32* out, u32 writer) {
  out[threadIdx.x] = numbers[0];
  if (threadIdx.x == writer) numbers[0] = 7;
}

KERNEL(vote_of_some, u32* out, u32 lanes) {
  if (threadIdx.x % 32 < lanes) out[threadIdx.x] = __ballot_sync(~0u, true);
}
KERNEL(vote_under_a_mask, u32* out, u32 lanes) {
  if (threadIdx.x % 32 < lanes) out[threadIdx.x] = __ballot_sync(~0u >> (32 - lanes), true);
}
KERNEL(vote_and_shuffle, u32* out, u32 lanes) {
  if (threadIdx.x % 32 < lanes)
    out[threadIdx.x] = __ballot_sync(~0u, true);
  else
    out[threadIdx.x] = __shfl_xor_sync(~0u, threadIdx.x, 1);
}
KERNEL(vote_and_barrier, u32* out, u32 lanes) {
  if (threadIdx.x % 32 < lanes)
    out[threadIdx.x] = __ballot_sync(~0u, true);
  else
    __syncthreads();
}

KERNEL(read_at, const unsigned char* in, u32* out, long long offset) { out[threadIdx.x] = *(const u32*)(in + offset); }
KERNEL(write_at, unsigned char* in, u32* out, long long offset) {
  if (threadIdx.x == 5) *(u32*)(in + offset) = 1;
}
KERNEL(read_shared_at, u32* out, u32 offset) {
  __shared__ u32 numbers[128];
  numbers[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = *(const u32*)((const unsigned char*)numbers + offset);
}
KERNEL(read_uninitialized, u32* out, u32 index) {
  __shared__ u32 numbers[128];
  if (index > 1000) numbers[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = numbers[index];
}

// Tickets in the order in which threads come.
KERNEL(tickets, u32* counter, u32* out) { out[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(counter, 1u); }
KERNEL(blocks_write_the_same, u32* out) { out[threadIdx.x] = blockIdx.x; }
