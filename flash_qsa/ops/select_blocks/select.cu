// The selection of kernel_select.py for NVIDIA GPUs: the K best of a row of ordered int32 scores,
// ids ascending. Exact. One block a row.
//
// Where the Triton kernel finds a bound by bisection, a histogram in shared memory finds it here: a
// pass counts the keys of a range by their distance from the range's top and keeps the one bin in
// which the wanted key lies, until few enough are left. Two passes do for almost every row, six for
// any. Chosen keys are marked by position, so that ids come out ascending without a sort, and
// nothing depends on the order in which threads meet.
//
// GROUP == 1: the row's keys are held in registers. GROUP > 1: maxima of groups are. The K-th
// largest is a lower bound of the K-th largest key, so only the K ... K + SLACK groups that reach
// it are read (of equal maxima the first). Their keys that reach the bound are the candidates;
// CAPACITY of them are held in shared memory, and where there are more, the listed groups are read
// again instead: concentrated scores only cost time.
//
// Macros: THREADS, BLOCKS (of a multiprocessor at least), UNITS (keys or maxima of a row: a
// multiple of 4 * THREADS), GROUP, TOP_K, SLACK, CAPACITY, HAS_FIRST, SHARED (bytes of Shared, as
// the host reserves them).

constexpr int WARPS = THREADS / 32;
constexpr int BINS = 4 * THREADS;
constexpr int LOG_BINS = THREADS == 64    ? 8
                         : THREADS == 128 ? 9
                         : THREADS == 256 ? 10
                         : THREADS == 512 ? 11
                                          : 12;
constexpr int QUADS = UNITS / THREADS / 4;  // 16-byte words of a thread
constexpr int PACKS = (QUADS + 3) / 4;
constexpr int GROUP_QUADS = GROUP > 1 ? GROUP / 4 : 1;
constexpr int LISTED = GROUP > 1 ? TOP_K + SLACK : 1;
constexpr int WORDS = GROUP > 1 ? (LISTED * GROUP + 31) / 32 : 1;
constexpr int OWN_WORDS = (WORDS + THREADS - 1) / THREADS;
constexpr int HELD = GROUP > 1 ? CAPACITY : 1;
constexpr int FEW = 64;   // keys of a bin that are ranked against each other
// 16-byte loads of a thread in flight: up to six, all of its share of the listed groups if it can
constexpr int SHARE = (LISTED * GROUP_QUADS + THREADS - 1) / THREADS;
constexpr int DEPTH = SHARE < 6 ? SHARE : 6;
// the first pass looks at four octaves below the largest key: those hold the cut of most rows
constexpr int FIRST_SHIFT = 23 + 2 - LOG_BINS;
constexpr int NAN_KEY = -1;
constexpr int HIDDEN = -2147483647 - 1;
constexpr unsigned ALL = 0xFFFFFFFFu;
// two counts in one word: `sure` members below, ties above
constexpr int TIE_SHIFT = 13;
constexpr int SURE_MASK = (1 << TIE_SHIFT) - 1;

static_assert(QUADS >= 1 && UNITS % (4 * THREADS) == 0, "UNITS: whole quads of every thread");
static_assert(BINS == 1 << LOG_BINS, "THREADS: 64, 128, 256, 512 or 1024");
static_assert(TOP_K + SLACK <= SURE_MASK, "TOP_K: counts share a word with ties");
static_assert(GROUP == 1 || (LISTED * GROUP >> (31 - TIE_SHIFT)) == 0, "ties need their bits");
static_assert(GROUP == 1 || SLACK > 0, "SLACK");

struct Arguments {
  const int *scores, *maxima, *request_ids, *visible, *first;
  int *out;
  long long stride_scores, stride_maxima, stride_out, row_begin;
  int width, num_requests, admit_next;
};

struct Cut {
  int sure, tied, ties;  // keys >= sure belong, and the first `ties` of those equal to `tied`
};

struct alignas(16) Shared {
  int histogram[BINS];  // zero outside of a pass
  unsigned sure_bits[WORDS], tie_bits[WORDS];
  int keys[HELD], positions[HELD];
  int groups[LISTED];
  int few[FEW];
  int sums[WARPS], highest[WARPS], lowest[WARPS];
  int held, few_count;
  int bin, above, inside;
  Cut cut;
};
static_assert(sizeof(Shared) == SHARED, "SHARED: the host's count of bytes");

#ifdef __CUDA_ARCH__
// or the row's address is multiplied out again at every access
#define KEEP(address)               \
  asm volatile("" : "+l"(address)); \
  __builtin_assume(__isGlobal(address))
#if __CUDA_ARCH__ >= 900
#define WAIT_FOR_SCORES() asm volatile("griddepcontrol.wait;" ::: "memory")
#define ADMIT_NEXT() asm volatile("griddepcontrol.launch_dependents;")
#endif
#else
#define KEEP(address)
#endif
#ifndef WAIT_FOR_SCORES
#define WAIT_FOR_SCORES()
#define ADMIT_NEXT()
#endif

extern __shared__ int4 shared_memory[];

__device__ __forceinline__ Shared &shared() { return *reinterpret_cast<Shared *>(shared_memory); }

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }

__device__ __forceinline__ int warp() { return threadIdx.x / 32; }

// Sum of `value` over the lanes up to this one.
template <class Number>
__device__ __forceinline__ Number sum_of_lanes(Number value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Number other = __shfl_up_sync(ALL, value, step);
    if (lane() >= step) value += other;
  }
  return value;
}

// Sum of `value` over the warps before this one. Every lane of a warp passes the warp's sum.
__device__ __forceinline__ int sum_of_warps_before(int value, int &total) {
  Shared &s = shared();
  if (lane() == 0) s.sums[warp()] = value;
  __syncthreads();
  const int other = lane() < WARPS ? s.sums[lane()] : 0;
  total = __reduce_add_sync(ALL, other);
  return __reduce_add_sync(ALL, lane() < warp() ? other : 0);
}

// The distance from the top, in powers of two, at which `span` fits the bins.
__device__ __forceinline__ int shift_of(unsigned span) {
  const int shift = max(0, 32 - __clz(span) - LOG_BINS);
  return (span >> shift) < BINS - 1 ? shift : shift + 1;
}

__device__ __forceinline__ int first_shift(int low, int high) {
  return min(shift_of((unsigned)high - (unsigned)low), FIRST_SHIFT);
}

// Counts a key by its distance from `high`. The last bin is not counted: it is what remains.
__device__ __forceinline__ void count_key(int key, int high, unsigned span, int shift) {
  const unsigned distance = (unsigned)high - (unsigned)key;
  const unsigned bin = distance >> shift;
  if (distance <= span && bin < BINS - 1) atomicAdd(&shared().histogram[bin], 1);
}

// Finds the bin that holds the want-th key of `count`, into shared bin, above and inside, and
// clears the histogram.
__device__ __forceinline__ void find_bin(int want, int count) {
  Shared &s = shared();
  int4 *mine = reinterpret_cast<int4 *>(s.histogram) + threadIdx.x;
  const int4 four = *mine;
  *mine = make_int4(0, 0, 0, 0);
  const int own[4] = {four.x, four.y, four.z, four.w};
  const int sum = four.x + four.y + four.z + four.w;
  int upto = sum_of_lanes(sum), counted;
  upto += sum_of_warps_before(__shfl_sync(ALL, upto, 31), counted);
  if (upto - sum < want && want <= upto) {
    int above = upto - sum;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (above < want && want <= above + own[i]) {
        s.bin = threadIdx.x * 4 + i, s.above = above, s.inside = own[i];
      }
      above += own[i];
    }
  }
  if (threadIdx.x == 0 && counted < want) {
    s.bin = BINS - 1, s.above = counted, s.inside = count - counted;
  }
  __syncthreads();
}

// A cut that between `want` and `most` of the `count` keys in low ... high pass; exactly `want`
// where it has ties. visit(use) calls use(key) for every key of this thread; keys outside are
// skipped. `shift`: of the first pass.
template <class Visit>
__device__ __forceinline__ Cut find_cut(Visit visit, int low, int high, int count, int want,
                                        int most, int shift) {
  Shared &s = shared();
  int above = 0;
  while (low != high) {
    const unsigned span = (unsigned)high - (unsigned)low;
    visit([&](int key) { count_key(key, high, span, shift); });
    __syncthreads();
    find_bin(want - above, count);
    const int bin = s.bin;
    count = s.inside;
    above += s.above;
    high -= bin << shift;
    if (bin < BINS - 1) low = max(low, high - ((1 << shift) - 1));
    if (above + count <= most) return {low, low, 0};
    if (most == want && count <= FEW && low != high) {
      const unsigned inside = (unsigned)high - (unsigned)low;
      visit([&](int key) {
        if ((unsigned)high - (unsigned)key <= inside) s.few[atomicAdd(&s.few_count, 1)] = key;
      });
      __syncthreads();
      // a warp ranks one key against all at once
      const int left = lane() < count ? s.few[lane()] : HIDDEN;
      const int right = lane() + 32 < count ? s.few[lane() + 32] : HIDDEN;
      for (int i = warp(); i < count; i += WARPS) {
        const int key = s.few[i];
        const int greater = above + __popc(__ballot_sync(ALL, left > key)) +
                            __popc(__ballot_sync(ALL, right > key));
        const int reached = above + __popc(__ballot_sync(ALL, left >= key)) +
                            __popc(__ballot_sync(ALL, right >= key));
        if (lane() == 0 && greater < want && want <= reached) {
          // where all equal ones belong there is no tie to break
          s.cut = reached == want ? Cut{key, key, 0} : Cut{key + 1, key, want - greater};
        }
      }
      __syncthreads();
      return s.cut;
    }
    shift = shift_of((unsigned)high - (unsigned)low);
  }
  return {low + 1, low, want - above};
}

// Keys ids[i] ... ids[i] + 3 of a row; HIDDEN outside of first ... stored - 1. Whole warps call it
// together.
template <int COUNT>
__device__ __forceinline__ void load_quads(const int *row, const int (&ids)[COUNT], int first,
                                           int stored, int (&keys)[4 * COUNT]) {
  // no load waits for another's keys
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    int4 quad = make_int4(HIDDEN, HIDDEN, HIDDEN, HIDDEN);
    if (ids[i] < stored) quad = *reinterpret_cast<const int4 *>(row + ids[i]);
    keys[4 * i] = quad.x, keys[4 * i + 1] = quad.y;
    keys[4 * i + 2] = quad.z, keys[4 * i + 3] = quad.w;
  }
  bool edge = false;
#pragma unroll
  for (int i = 0; i < COUNT; i++) edge |= ids[i] < first || ids[i] + 4 > stored;
#pragma unroll
  for (int i = 0; i < 4 * COUNT; i++) keys[i] = max(keys[i], NAN_KEY);
  if (__ballot_sync(ALL, edge)) {
#pragma unroll
    for (int i = 0; i < 4 * COUNT; i++) {
      const int id = ids[i / 4] + i % 4;
      if (id < first || id >= stored) keys[i] = HIDDEN;
    }
  }
}

// Position of a thread's quad in its row: a warp's quads lie together, so that its members precede
// those of later warps.
__device__ __forceinline__ int unit_of(int quad) {
  return 4 * (warp() * (32 * QUADS) + quad * 32 + lane());
}

// The cut of `count` units begin ... end - 1, which registers hold, and their largest.
__device__ __forceinline__ Cut cut_units(const int (&units)[4 * QUADS], int count, int most,
                                         int &largest) {
  Shared &s = shared();
  int high = HIDDEN, low = 0x7FFFFFFF;
#pragma unroll
  for (int i = 0; i < 4 * QUADS; i++) {
    high = max(high, units[i]);
    low = (int)min((unsigned)low, (unsigned)(units[i] - NAN_KEY));  // hidden units stay behind
  }
  high = __reduce_max_sync(ALL, high);
  low = __reduce_min_sync(ALL, low);
  if (lane() == 0) s.highest[warp()] = high, s.lowest[warp()] = low;
  __syncthreads();
  high = __reduce_max_sync(ALL, lane() < WARPS ? s.highest[lane()] : HIDDEN);
  low = __reduce_min_sync(ALL, lane() < WARPS ? s.lowest[lane()] : 0x7FFFFFFF) + NAN_KEY;
  largest = high;
  if (count <= most) return {NAN_KEY, NAN_KEY, 0};
  const auto visit = [&](auto use) {
#pragma unroll
    for (int i = 0; i < 4 * QUADS; i++) use(units[i]);
  };
  return find_cut(visit, low, high, count, TOP_K, most, first_shift(low, high));
}

// Of a warp's units that pass: how many of each quad precede a lane's, and the warp's sums. A byte a
// quad, of at most 128 units: one scan over the lanes serves four quads.
struct Ranks {
  unsigned before[PACKS], sums[PACKS];

  template <class Passes>
  __device__ __forceinline__ int count(const int (&units)[4 * QUADS], Passes passes) {
    int total = 0;
#pragma unroll
    for (int pack = 0; pack < PACKS; pack++) {
      unsigned own = 0;
#pragma unroll
      for (int i = 16 * pack; i < 4 * QUADS && i < 16 * pack + 16; i++) {
        own += passes(units[i]) << 8 * (i / 4 % 4);
      }
      const unsigned upto = sum_of_lanes(own);
      before[pack] = upto - own;
      sums[pack] = __shfl_sync(ALL, upto, 31);
      total = __dp4a(sums[pack], 0x01010101u, (unsigned)total);
    }
    return total;
  }

  __device__ __forceinline__ int before_lane(int quad) const { return byte(before, quad); }

  __device__ __forceinline__ int of_warp(int quad) const { return byte(sums, quad); }

  static __device__ __forceinline__ int byte(const unsigned (&packs)[PACKS], int quad) {
    return packs[quad / 4] >> 8 * (quad % 4) & 0xFF;
  }
};

// Calls emit(place, unit) for every unit that the cut lets pass, places ascending over the block.
// TIES: whether the cut has ties. Returns how many passed.
template <bool TIES, class Emit>
__device__ __forceinline__ int place_quads(const int (&units)[4 * QUADS], Cut cut, Emit emit) {
  Ranks sure, tied;
  int own = sure.count(units, [&](int unit) { return unit >= cut.sure; }), total;
  if (TIES) own += tied.count(units, [&](int unit) { return unit == cut.tied; }) << TIE_SHIFT;
  int base = sum_of_warps_before(own, total);
#pragma unroll
  for (int quad = 0; quad < QUADS; quad++) {
    int before = base + sure.before_lane(quad);
    base += sure.of_warp(quad);
    if (TIES) {
      before += tied.before_lane(quad) << TIE_SHIFT;
      base += tied.of_warp(quad) << TIE_SHIFT;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int unit = units[4 * quad + i], place = unit_of(quad) + i;
      if (unit >= cut.sure) {
        const int ties = TIES ? min(before >> TIE_SHIFT, cut.ties) : 0;
        emit(TIES ? (before & SURE_MASK) + ties : before, place);
        before += 1;
      } else if (TIES && unit == cut.tied) {
        if (before >> TIE_SHIFT < cut.ties) {
          emit((before & SURE_MASK) + (before >> TIE_SHIFT), place);
        }
        before += 1 << TIE_SHIFT;
      }
    }
  }
  return (total & SURE_MASK) + min(total >> TIE_SHIFT, cut.ties);
}

template <class Emit>
__device__ __forceinline__ int place_units(const int (&units)[4 * QUADS], Cut cut, Emit emit) {
  return cut.ties > 0 ? place_quads<true>(units, cut, emit) : place_quads<false>(units, cut, emit);
}

// Calls use(keys, start) for DEPTH quads of every lane at a time, until all quads of the listed
// groups were used: keys[4 * i ... 4 * i + 3] are those of position_of(start, i) on, HIDDEN behind
// the last. Whole warps call it together.
template <class Use>
__device__ __forceinline__ void visit_listed(const int *row, int listed, int first, int stored,
                                             Use use) {
  Shared &s = shared();
  const unsigned quads = listed * GROUP_QUADS;
  for (unsigned start = warp() * 32; start < quads; start += THREADS * DEPTH) {
    int ids[DEPTH], keys[4 * DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      const unsigned index = start + i * THREADS + lane();
      ids[i] = stored;
      if (index < quads) ids[i] = s.groups[index / GROUP_QUADS] * GROUP + index % GROUP_QUADS * 4;
    }
    load_quads<DEPTH>(row, ids, first, stored, keys);
    use(keys, start);
  }
}

// Position of a lane's i-th key among the listed groups' keys.
__device__ __forceinline__ int position_of(int start, int i) {
  return 4 * (start + i / 4 * THREADS + lane()) + i % 4;
}

// Marks a key at its position among the listed groups' keys where the cut lets it pass.
__device__ __forceinline__ void mark(int key, int position, Cut cut) {
  Shared &s = shared();
  const unsigned bit = 1u << position % 32;
  if (key >= cut.sure) {
    atomicOr(&s.sure_bits[position / 32], bit);
  } else if (cut.ties > 0 && key == cut.tied) {
    atomicOr(&s.tie_bits[position / 32], bit);
  }
}

// Writes the marked keys' ids in order, and of the ties the first.
__device__ __forceinline__ void write_marked(int *out, int listed, Cut cut) {
  Shared &s = shared();
  const int words = (listed * GROUP + 31) / 32, start = threadIdx.x * OWN_WORDS;
  int own = 0;
#pragma unroll
  for (int i = 0; i < OWN_WORDS; i++) {
    if (start + i < words) {
      own += __popc(s.sure_bits[start + i]) + (__popc(s.tie_bits[start + i]) << TIE_SHIFT);
    }
  }
  const int upto = sum_of_lanes(own);
  int total;
  int before = upto - own + sum_of_warps_before(__shfl_sync(ALL, upto, 31), total);
#pragma unroll
  for (int i = 0; i < OWN_WORDS; i++) {
    if (start + i >= words) break;
    const unsigned sure = s.sure_bits[start + i];
    unsigned marked = sure | s.tie_bits[start + i];
    while (marked) {
      const int bit = __ffs(marked) - 1, position = (start + i) * 32 + bit;
      const int ties = before >> TIE_SHIFT;
      const bool certain = sure >> bit & 1;
      if (certain || ties < cut.ties) {
        const int id = s.groups[position / GROUP] * GROUP + position % GROUP;
        out[(before & SURE_MASK) + min(ties, cut.ties)] = id;
      }
      before += certain ? 1 : 1 << TIE_SHIFT;
      marked &= marked - 1;
    }
  }
}

// The best keys of the listed groups, all of which reach `bound` and none of which exceeds
// `largest`.
__device__ __forceinline__ void select_listed(const int *row, int *out, int listed, int bound,
                                              int largest, int first, int stored) {
  Shared &s = shared();
  visit_listed(row, listed, first, stored, [&](const int (&keys)[4 * DEPTH], int start) {
    int own = 0;
#pragma unroll
    for (int i = 0; i < 4 * DEPTH; i++) own += keys[i] >= bound;
    int upto = sum_of_lanes(own), place = 0;
    if (lane() == 31) place = atomicAdd(&s.held, upto);
    place = __shfl_sync(ALL, place, 31) + upto - own;
    // what is behind the last place is not held, and then nothing is read from the list
    if (place + own > CAPACITY) return;
#pragma unroll
    for (int i = 0; i < 4 * DEPTH; i++) {
      if (keys[i] < bound) continue;
      s.keys[place] = keys[i], s.positions[place] = position_of(start, i);
      place++;
    }
  });
  __syncthreads();
  const int held = s.held, shift = first_shift(bound, largest);
  Cut cut;
  if (held <= CAPACITY) {
    const auto visit = [&](auto use) {
      for (int i = threadIdx.x; i < held; i += THREADS) use(s.keys[i]);
    };
    cut = find_cut(visit, bound, largest, held, TOP_K, TOP_K, shift);
    for (int i = threadIdx.x; i < held; i += THREADS) mark(s.keys[i], s.positions[i], cut);
  } else {
    const auto visit = [&](auto use) {
      visit_listed(row, listed, first, stored, [&](const int (&keys)[4 * DEPTH], int) {
#pragma unroll
        for (int i = 0; i < 4 * DEPTH; i++) use(keys[i]);
      });
    };
    cut = find_cut(visit, bound, largest, held, TOP_K, TOP_K, shift);
    visit_listed(row, listed, first, stored, [&](const int (&keys)[4 * DEPTH], int start) {
#pragma unroll
      for (int i = 0; i < 4 * DEPTH; i++) mark(keys[i], position_of(start, i), cut);
    });
  }
  __syncthreads();
  write_marked(out, listed, cut);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    select_blocks_cuda(const Arguments given) {
  Shared &s = shared();
  const long long local = blockIdx.x, row = given.row_begin + local;
  const int request = given.request_ids[row];
  int visible = given.visible[row];
  if (request < 0 || request >= given.num_requests) visible = 0;
  int first = 0;
  if (HAS_FIRST) first = max(given.first[row], 0);
  // scores exist for first ... stored - 1; blocks behind them have no page and rank last
  const int stored = min(visible, given.width);
  int *out = given.out + row * given.stride_out;
  KEEP(out);
  for (int i = threadIdx.x; i < BINS; i += THREADS) s.histogram[i] = 0;
  if (GROUP > 1) {
    for (int i = threadIdx.x; i < WORDS; i += THREADS) s.sure_bits[i] = s.tie_bits[i] = 0;
  }
  if (threadIdx.x == 0) s.held = s.few_count = 0;
  // Everything above was written before the scorer let this kernel in.
  WAIT_FOR_SCORES();
  if (given.admit_next) {
    ADMIT_NEXT();
  }
  if (stored - first <= TOP_K) {
    for (int i = threadIdx.x; i < TOP_K; i += THREADS) {
      out[i] = i < visible - first ? first + i : -1;
    }
    return;
  }
  const int *scores = given.scores + local * given.stride_scores;
  KEEP(scores);
  const int *source = GROUP > 1 ? given.maxima + local * given.stride_maxima : scores;
  const int begin = first / GROUP, end = (stored + GROUP - 1) / GROUP;
  int places[QUADS], units[4 * QUADS];
#pragma unroll
  for (int quad = 0; quad < QUADS; quad++) places[quad] = unit_of(quad);
  load_quads<QUADS>(source, places, begin, end, units);
  int largest;
  if (GROUP == 1) {
    const Cut cut = cut_units(units, end - begin, TOP_K, largest);
    place_units(units, cut, [&](int place, int id) { out[place] = id; });
  } else {
    const Cut cut = cut_units(units, end - begin, TOP_K + SLACK, largest);
    const int listed =
        place_units(units, cut, [&](int place, int group) { s.groups[place] = group; });
    __syncthreads();
    select_listed(scores, out, listed, cut.ties > 0 ? cut.tied : cut.sure, largest, first, stored);
  }
}
