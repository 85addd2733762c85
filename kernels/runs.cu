// Putting together what lies apart: coded streams, and the sections that go to the host in one copy.
#include "warp.h"

struct alignas(16) Quad {
  u32 words[4];
};

// Bytes up to the first whole word, words, bytes behind the last; both ends are as far from a whole word.
template <class Word>
FN void copy_run(u8* to, const u8* from, u32 bytes) {
  u32 before = (0 - (u32)(u64)from) % sizeof(Word);
  if (before > bytes) before = bytes;
  u32 words = (bytes - before) / sizeof(Word), done = before + words * sizeof(Word);
  warp_copy(to, from, before);
  warp_copy((Word*)(to + before), (const Word*)(from + before), words);
  warp_copy(to + done, from + done, bytes - done);
}

// One warp a run of bytes: 16 at a time where both ends are aligned alike; else 2, the least that they must be.
KERNEL(copy_runs, const u64* from, const u64* to, const u32* bytes) {
  FOR_EACH_WARP(warp) {
    u8* target = (u8*)to[warp];
    const u8* source = (const u8*)from[warp];
    if ((from[warp] - to[warp]) % sizeof(Quad) == 0)
      copy_run<Quad>(target, source, bytes[warp]);
    else
      copy_run<u16>(target, source, bytes[warp]);
  }
}
