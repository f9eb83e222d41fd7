// Runs a kernel on the host: a block's threads are fibers of one OS thread, blocks run one after the other.
//
// What a GPU leaves undefined is a fault here: a barrier that some threads miss, a shuffle that some lanes of the wave
// miss, shared memory over the limit. Shared memory starts as NaN in every block. The order in which threads run is the
// launch's choice (forward, reverse, random), so a result that depends on it shows. Not modelled: threads that run at the
// same instant, and the rounding of hardware approximations.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#define SPILLWAY_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SPILLWAY_ASAN 1
#endif
#endif
#if defined(SPILLWAY_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__) || defined(SPILLWAY_UCONTEXT)
#define SPILLWAY_SWITCH_UCONTEXT 1
#include <ucontext.h>
#endif

namespace emulated {

// What the host passes; mirrored by worker-gpu/src/hip/emulated/abi.rs.
struct Launch {
  std::uint32_t grid[3];
  std::uint32_t block[3];
  std::uint32_t dynamic_shared;  // bytes
  std::uint32_t shared_limit;    // bytes, static and dynamic together
  std::uint32_t order;           // 0 forward, 1 reverse, 2 random
  std::uint32_t seed;            // of the random order
  unsigned char* stacks;         // STACK_BYTES for each thread of a block, 4096-byte aligned
  char* message;                 // receives the reason of a fault, NUL-terminated
  std::uint64_t message_bytes;
};

// What the host reads; mirrored likewise.
struct Kernel {
  std::uint32_t abi;
  std::uint32_t wave;
  std::uint32_t max_threads;
  std::uint32_t parameters;
  const std::uint32_t* parameter_bytes;
  std::uint64_t stack_bytes;
  std::int32_t (*launch)(const Launch*, void** arguments);  // 0, or 1 after a fault
};

constexpr std::uint32_t ABI = 1;
#if defined(SPILLWAY_ASAN)
constexpr std::size_t STACK_BYTES = 128 << 10;
constexpr std::size_t SHARED_GUARD = 64;  // poisoned bytes between shared arrays
#else
constexpr std::size_t STACK_BYTES = 32 << 10;
constexpr std::size_t SHARED_GUARD = 0;
#endif
constexpr std::size_t SHARED_SITES = 64;  // shared arrays of one source file

enum class State : std::uint8_t { Ready, AtBarrier, AtShuffle, Returned };

// A stack to switch to, and what the address sanitizer wants to know about it.
struct Fiber {
#if defined(SPILLWAY_SWITCH_UCONTEXT)
  ucontext_t context;
#else
  void* stack_pointer;
#endif
  void* fake_stack = nullptr;
  const void* stack_bottom = nullptr;
  std::size_t stack_size = 0;
};

struct Lane : Fiber {
  std::uint32_t thread;
  std::uint32_t shuffles = 0;
  State state = State::Ready;
};

// One exchange area per wave; two of them in turn, so that a fast lane cannot overwrite what a slow one still reads.
struct Wave {
  std::uint32_t lanes = 0;
  std::uint32_t waiting = 0;
  std::uint32_t exchange[2][64];
};

struct Block;
inline thread_local Block* block = nullptr;
inline thread_local Lane* current = nullptr;

#if !defined(SPILLWAY_SWITCH_UCONTEXT)
// Saves the callee-saved registers on the old stack and takes those of the new one.
extern "C" __attribute__((naked, noinline)) inline void spillway_switch_stack(void**, void*) {
  asm("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret");
}
#endif

struct Block {
  const Launch& launch;
  void (*body)(void**);
  void** arguments;
  std::uint32_t index[3] = {0, 0, 0};
  std::vector<Lane> lanes;
  std::vector<Wave> waves;
  std::vector<std::uint32_t> order;     // position -> thread
  std::vector<std::uint32_t> position;  // thread -> position
  std::uint32_t waiting = 0;
  std::uint32_t returned = 0;
  bool failed = false;
  Fiber host;
  std::vector<unsigned char> shared;
  std::size_t shared_used = 0;  // with guards
  std::size_t shared_bytes = 0;
  unsigned char* shared_sites[SHARED_SITES] = {};
  unsigned char* dynamic_shared = nullptr;

  Block(const Launch& launch, void (*body)(void**), void** arguments)
      : launch(launch),
        body(body),
        arguments(arguments),
        lanes(launch.block[0]),
        waves(launch.block[0] / SPILLWAY_WAVE),
        order(launch.block[0]),
        position(launch.block[0]),
        shared(launch.shared_limit + (SHARED_SITES + 2) * (SHARED_GUARD + 16)) {
    for (std::uint32_t i = 0; i < lanes.size(); i++) order[i] = i;
    if (launch.order == 1) std::reverse(order.begin(), order.end());
    if (launch.order == 2) shuffle_order(launch.seed);
    for (std::uint32_t i = 0; i < lanes.size(); i++) position[order[i]] = i;
  }
  Block(const Block&) = delete;

#if defined(SPILLWAY_ASAN)
  // Fibers end without unwinding their last frame, so its marks are still on their stacks.
  ~Block() {
    ASAN_UNPOISON_MEMORY_REGION(shared.data(), shared.size());
    ASAN_UNPOISON_MEMORY_REGION(launch.stacks, lanes.size() * STACK_BYTES);
  }
#endif

  void shuffle_order(std::uint64_t seed) {
    std::uint64_t state = seed * 2 + 1;
    for (std::size_t i = order.size() - 1; i > 0; i--) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      std::swap(order[i], order[(state >> 33) % (i + 1)]);
    }
  }

  // Notes the first reason and leaves the block: its other fibers are abandoned.
  [[noreturn]] void fault(const char* reason) {
    std::snprintf(launch.message, launch.message_bytes, "%s (block %u,%u,%u thread %u)", reason, index[0], index[1],
                  index[2], current->thread);
    failed = true;
    switch_to(*current, host, true);
    __builtin_unreachable();
  }

  void run(std::uint32_t x, std::uint32_t y, std::uint32_t z) {
    index[0] = x, index[1] = y, index[2] = z;
    waiting = returned = 0;
    prepare_shared();
    for (Wave& wave : waves) wave.lanes = SPILLWAY_WAVE, wave.waiting = 0;
    for (std::uint32_t thread = 0; thread < lanes.size(); thread++) prepare(lanes[thread], thread);
    current = &lanes[order[0]];
    switch_to(host, *current, false);
  }

  void prepare_shared() {
    shared_used = shared_bytes = 0;
    std::fill(std::begin(shared_sites), std::end(shared_sites), nullptr);
#if defined(SPILLWAY_ASAN)
    ASAN_UNPOISON_MEMORY_REGION(shared.data(), shared.size());
#endif
    std::memset(shared.data(), 0xff, shared.size());
#if defined(SPILLWAY_ASAN)
    ASAN_POISON_MEMORY_REGION(shared.data(), shared.size());
#endif
    dynamic_shared = carve(launch.dynamic_shared);
  }

  unsigned char* carve(std::size_t bytes) {
    std::uintptr_t base = reinterpret_cast<std::uintptr_t>(shared.data()) + shared_used + SHARED_GUARD;
    unsigned char* start = reinterpret_cast<unsigned char*>((base + 15) & ~std::uintptr_t{15});
    shared_used = static_cast<std::size_t>(start - shared.data()) + bytes;
    shared_bytes += bytes;
#if defined(SPILLWAY_ASAN)
    ASAN_UNPOISON_MEMORY_REGION(start, bytes);
#endif
    return start;
  }

  unsigned char* shared_site(std::size_t site, std::size_t bytes) {
    if (site >= SHARED_SITES) fault("too many shared arrays in one source file");
    if (shared_sites[site] == nullptr) {
      if (shared_bytes + bytes > launch.shared_limit) fault("the shared memory of the block is over the limit");
      shared_sites[site] = carve(bytes);
    }
    return shared_sites[site];
  }

  void barrier() {
    if (returned != 0) fault("a barrier after another thread of the block has returned");
    current->state = State::AtBarrier;
    if (++waiting < lanes.size()) return yield("a barrier that not all threads of the block reach");
    for (Lane& lane : lanes) lane.state = State::Ready;
    waiting = 0;
  }

  std::uint32_t shuffle(std::uint32_t bits, std::uint32_t source) {
    std::uint32_t number = current->thread / SPILLWAY_WAVE;
    Wave& wave = waves[number];
    std::uint32_t* exchange = wave.exchange[current->shuffles++ % 2];
    exchange[current->thread % SPILLWAY_WAVE] = bits;
    current->state = State::AtShuffle;
    if (++wave.waiting < wave.lanes) {
      yield("a shuffle that not all lanes of the wave reach");
    } else {
      for (std::uint32_t lane = 0; lane < SPILLWAY_WAVE; lane++) {
        lanes[number * SPILLWAY_WAVE + lane].state = State::Ready;
      }
      wave.waiting = 0;
    }
    return exchange[source];
  }

  // Lets the next thread that can run have the processor; comes back when this one may go on.
  void yield(const char* stuck) {
    Lane* next = next_ready();
    if (next == nullptr) fault(stuck);
    Lane& self = *current;
    current = next;
    switch_to(self, *next, false);
  }

  Lane* next_ready() {
    std::uint32_t here = position[current->thread];
    for (std::uint32_t step = 1; step <= lanes.size(); step++) {
      std::uint32_t at = here + step;
      Lane& lane = lanes[order[at < lanes.size() ? at : at - lanes.size()]];
      if (lane.state == State::Ready) return &lane;
    }
    return nullptr;
  }

  [[noreturn]] void finish() {
    Lane& self = *current;
    self.state = State::Returned;
    returned++;
    Lane* next = next_ready();
    if (next == nullptr && returned != lanes.size()) {
      fault("a thread returned while others wait at a barrier or shuffle");
    }
    if (next != nullptr) current = next;
    switch_to(self, next != nullptr ? static_cast<Fiber&>(*next) : host, true);
    __builtin_unreachable();
  }

  static void enter() {
#if defined(SPILLWAY_ASAN)
    // The first fiber to start learns where the host's stack is.
    const void* bottom;
    std::size_t size;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
    if (block->host.stack_bottom == nullptr) block->host.stack_bottom = bottom, block->host.stack_size = size;
#endif
    block->body(block->arguments);
    block->finish();
  }

  void prepare(Lane& lane, std::uint32_t thread) {
    unsigned char* bottom = launch.stacks + thread * STACK_BYTES;
    lane.thread = thread;
    lane.shuffles = 0;
    lane.state = State::Ready;
    lane.fake_stack = nullptr;
    lane.stack_bottom = bottom;
    lane.stack_size = STACK_BYTES;
#if defined(SPILLWAY_ASAN)
    ASAN_UNPOISON_MEMORY_REGION(bottom, STACK_BYTES);
#endif
#if defined(SPILLWAY_SWITCH_UCONTEXT)
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = bottom;
    lane.context.uc_stack.ss_size = STACK_BYTES;
    lane.context.uc_link = nullptr;
    makecontext(&lane.context, &Block::enter, 0);
#else
    // Top of the stack, from above: no return address, `enter` to return into, six registers.
    void** top = reinterpret_cast<void**>(bottom + STACK_BYTES);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(&Block::enter);
    for (int saved = 0; saved < 6; saved++) *--top = nullptr;
    lane.stack_pointer = top;
#endif
  }

  static void switch_to(Fiber& from, Fiber& to, [[maybe_unused]] bool for_good) {
#if defined(SPILLWAY_ASAN)
    __sanitizer_start_switch_fiber(for_good ? nullptr : &from.fake_stack, to.stack_bottom, to.stack_size);
#endif
#if defined(SPILLWAY_SWITCH_UCONTEXT)
    swapcontext(&from.context, &to.context);
#else
    spillway_switch_stack(&from.stack_pointer, to.stack_pointer);
#endif
#if defined(SPILLWAY_ASAN)
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
  }
};

// The shared array of one place in the source: the first thread to come by carves it, the others find it.
template <class T, std::size_t COUNT>
T* shared_array(std::size_t site) {
  return reinterpret_cast<T*>(block->shared_site(site, sizeof(T) * COUNT));
}

inline std::int32_t run(const Launch& launch, void (*body)(void**), void** arguments) {
  Block state(launch, body, arguments);
  block = &state;
  for (std::uint32_t z = 0; z < launch.grid[2]; z++)
    for (std::uint32_t y = 0; y < launch.grid[1]; y++)
      for (std::uint32_t x = 0; x < launch.grid[0]; x++) {
        state.run(x, y, z);
        if (state.failed) return 1;
      }
  block = nullptr;
  return 0;
}

// What the host needs to launch FUNCTION: sizes of its parameters, and a caller that unpacks an argument array.
template <auto FUNCTION, std::uint32_t MAX_THREADS>
struct Describe;

template <class... P, void (*FUNCTION)(P...), std::uint32_t MAX_THREADS>
struct Describe<FUNCTION, MAX_THREADS> {
  static constexpr std::uint32_t parameter_bytes[] = {static_cast<std::uint32_t>(sizeof(P))...};

  template <std::size_t... I>
  static void call(void** arguments, std::index_sequence<I...>) {
    FUNCTION(*static_cast<P*>(arguments[I])...);
  }
  static void body(void** arguments) { call(arguments, std::index_sequence_for<P...>{}); }
  static std::int32_t launch(const Launch* launch, void** arguments) { return run(*launch, body, arguments); }

  static constexpr Kernel kernel = {ABI,         SPILLWAY_WAVE, MAX_THREADS, sizeof...(P), parameter_bytes,
                                    STACK_BYTES, &launch};
};

}  // namespace emulated
