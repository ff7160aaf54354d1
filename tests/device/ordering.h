// Streams, clocks and memory of the device `sim`: which work is ordered before which, and who touched which memory.
//
// Kernels of `sim` run at once, in the thread that launches them, but count as work of their stream. Every stream has a
// vector clock, and so has the host. Entry i of a clock says how much work of stream i is certainly done before
// whatever the clock's owner does next. An event carries the clock of its stream; a stream or the host that waits for
// the event joins that clock into its own. Two launches that touch the same bytes, one of them writing, are a race
// unless the clock of the later one covers the earlier one. The bytes of a tensor are taken to be all from its first to
// its last: two streams that work on different columns of a matrix are said to race. New memory counts as written by
// all earlier work of the stream that was current when the memory was allocated: that work may have used it before.
//
// All threads of the host share one clock: what one thread has waited for counts as waited for by all, because the
// locks and queues with which Python threads wait for each other cannot be seen from here.
//
// This part knows nothing of torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace sim {

constexpr int kStreamsPerDevice = 33;  // the default stream (id 0) and a pool of 32, as in torch's CUDA backend
constexpr int kPinnedHost = -1;        // instead of a device: page-locked host memory

// A stream is named by one number: its device times kStreamsPerDevice plus its id on that device.
inline int stream_of(int device, int64_t id) { return device * kStreamsPerDevice + static_cast<int>(id); }
inline int device_of(int stream) { return stream / kStreamsPerDevice; }
std::string stream_name(int stream);

using Clock = std::vector<uint64_t>;

// One kernel or copy: what it is called, where it runs, and the how-many-th work of its stream it is.
struct Launch {
  std::string name;
  int stream;
  uint64_t time;
};
using LaunchPtr = std::shared_ptr<const Launch>;

struct Access {
  size_t begin, end;  // bytes of the memory
  bool write;
  LaunchPtr launch;
};

struct LateCopy;

// One allocation: the memory of a device storage, or a block of pinned host memory.
struct Memory {
  std::shared_ptr<void> owner;  // frees the bytes
  char* data;
  size_t nbytes;
  int device;
  int stream;       // current when the memory was allocated; the allocator may give freed memory to its next kernel
  uint64_t number;  // for messages
  std::vector<Access> accesses;  // those that a later launch may still conflict with
  std::set<int> recorded_streams;
  std::vector<std::shared_ptr<LateCopy>> late_copies;
};

// What a launch is going to do to an allocation.
struct Use {
  Memory* memory;
  size_t begin, end;
  bool write;
};

// A non-blocking copy between device memory and pinned host memory. It moves its bytes as late as the order of the
// program allows.
struct LateCopy {
  LaunchPtr launch;
  Memory* host;
  Memory* device;  // null if its memory was freed, or is no longer needed
  char* host_data;
  char* device_data;
  bool to_host;
  // The bytes of the source when the copy was launched. To the host, these are delivered. To the device, the copy
  // delivers what it finds late, and compares.
  std::vector<char> values;
  bool moved = false;
  bool finished = false;
};

// Settings, from the environment; Python may change them.
int device_count();
bool races_are_errors();
void set_races_are_errors(bool);
void set_seed(int seed);  // 0: no waiting
void take_time();  // lets the calling thread wait for a random time, so that threads meet in another order

// Memory.
Memory* new_memory(std::shared_ptr<void> owner, void* data, size_t nbytes, int device, int stream);
void free_memory(void* memory) noexcept;  // a race that this deleter finds is thrown by the next operation
void record_stream(Memory& memory, int stream);
Memory* find_pinned(const void* data);  // the block that holds this address, or null

// Launches. `launch` throws std::runtime_error if the uses are not ordered after all conflicting ones.
LaunchPtr launch(const std::string& name, int stream, const std::vector<Use>& uses);
void note_output(Memory& memory, const LaunchPtr& launch);  // new memory that the launch has filled
void add_late_copy(LateCopy copy);
std::mutex& running(int stream);  // held while work of the stream runs: its kernels run one after the other

// What orders work.
Clock clock_of(int stream);
void wait(int stream, const Clock& clock);  // later work of the stream starts after all that the clock covers
void host_wait(const Clock& clock);         // the host goes on after all that the clock covers
void host_wait_stream(int stream);
void host_wait_device(int device);

// Counts.
void count(const std::string& name, int64_t amount = 1);
std::map<std::string, int64_t> counts();
std::map<std::string, int64_t> kernel_counts();
void reset_counts();

}  // namespace sim
