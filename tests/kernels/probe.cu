// Kernels that show how launches are split and arguments passed; they stand apart from warp.h so that they test the device alone.
#define PROBE(name, ...) extern "C" __attribute__((visibility("default"))) void name(int first, int last, __VA_ARGS__)

// counts[w] += 1 for every warp of the piece, and starts[w] = the piece's first warp.
PROBE(probe_pieces, unsigned* counts, int* starts) {
  for (int warp = first; warp < last; ++warp) {
    counts[warp] += 1;
    starts[warp] = first;
  }
}

PROBE(probe_scalars, int a, unsigned b, long long c, unsigned long long d, float e, double* out) {
  out[0] = a;
  out[1] = b;
  out[2] = (double)c;
  out[3] = (double)d;
  out[4] = e;
}

// Converts between half and single precision, which the x86-64 baseline leaves to the compiler's runtime.
PROBE(probe_half, const _Float16* half, float* single) {
  for (int warp = first; warp < last; ++warp)
    for (int lane = 0; lane < 32; ++lane) single[32 * warp + lane] = half[32 * warp + lane];
}

// Keeps a core busy for a while without the memory.
PROBE(probe_spin, unsigned rounds, unsigned* out) {
  for (int warp = first; warp < last; ++warp) {
    unsigned x = warp;
    for (unsigned i = 0; i < rounds; ++i) x = x * 1664525u + 1013904223u;
    out[warp] = x;
  }
}
