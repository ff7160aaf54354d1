#include "ordering.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace sim {
namespace {

constexpr char kPoison = static_cast<char>(0xFF);  // not-a-number in every floating-point format, -1 in integers
constexpr size_t kMaxAccesses = 64;                // of one allocation; more are merged

struct Stream {
  Clock clock;
  std::deque<std::shared_ptr<LateCopy>> late_copies;  // in the order of their launches
  std::mutex running;
};

int number_from_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoi(text) : otherwise;
}

// Never destroyed: memory may be freed after static objects are gone.
struct State {
  std::mutex lock;
  int devices = std::max(1, number_from_environment("SIM_DEVICES", 2));
  std::atomic<bool> races{number_from_environment("SIM_RACES", 1) != 0};
  int seed = number_from_environment("SIM_SEED", 0);
  std::mt19937 random{static_cast<uint32_t>(seed)};
  std::vector<Stream> streams = std::vector<Stream>(devices * kStreamsPerDevice);
  Clock host = Clock(streams.size(), 0);
  std::map<const char*, Memory*> pinned;  // by the address of the first byte
  uint64_t memories = 0;
  std::string fault;  // a race that was found where nothing can be thrown
  std::map<std::string, int64_t> counts, kernels;

  State() {
    for (auto& stream : streams) stream.clock = host;
  }
};

State& state() {
  static State* only = new State;
  return *only;
}

using Lock = std::lock_guard<std::mutex>;

void join(Clock& into, const Clock& from) {
  for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], from[i]);
}

bool covers(const Clock& clock, const Launch& launch) { return launch.time <= clock[launch.stream]; }

std::string describe(const Memory& memory) {
  std::ostringstream text;
  text << (memory.device == kPinnedHost ? "pinned memory" : "storage") << " #" << memory.number << " (" << memory.nbytes
       << " bytes";
  if (memory.device != kPinnedHost) text << " of sim:" << memory.device;
  text << ")";
  return text.str();
}

std::string describe(const Launch& launch) {
  return launch.name + " (launch " + std::to_string(launch.time) + " of " + stream_name(launch.stream) + ")";
}

void found(const std::string& fault) {
  if (state().races && state().fault.empty()) state().fault = "race on the device sim: " + fault;
}

void raise_fault() {
  std::string fault;
  fault.swap(state().fault);
  if (!fault.empty()) throw std::runtime_error(fault);
}

// ---- Late copies ----------------------------------------------------------------------------------------------------

void check_source(LateCopy& copy) {
  const size_t nbytes = copy.values.size();
  if (copy.to_host || !std::memcmp(copy.host_data, copy.values.data(), nbytes)) return;
  std::memcpy(copy.values.data(), copy.host_data, nbytes);  // said once
  found("the host changed " + describe(*copy.host) + " while " + describe(*copy.launch) +
        " may still be reading it: synchronize with an event after the copy before writing to its source");
}

void move_bytes(LateCopy& copy) {
  if (copy.moved) return;
  copy.moved = true;
  const size_t nbytes = copy.values.size();
  if (copy.to_host) {
    const bool intact = std::all_of(copy.host_data, copy.host_data + nbytes, [](char c) { return c == kPoison; });
    if (!intact) {
      found("the host wrote to " + describe(*copy.host) + " while " + describe(*copy.launch) +
            " may still be writing to it: synchronize with an event after the copy first");
    }
    std::memcpy(copy.host_data, copy.values.data(), nbytes);
  } else {
    check_source(copy);
    if (copy.device) std::memcpy(copy.device_data, copy.host_data, nbytes);
  }
}

void forget(Memory* memory, const LateCopy* copy) {
  if (!memory) return;
  auto& list = memory->late_copies;
  list.erase(std::remove_if(list.begin(), list.end(), [&](auto& other) { return other.get() == copy; }), list.end());
}

// The host knows that the copy is done.
void finish(const std::shared_ptr<LateCopy>& copy) {
  if (copy->finished) return;
  move_bytes(*copy);
  check_source(*copy);
  copy->finished = true;
  forget(copy->host, copy.get());
  forget(copy->device, copy.get());
}

void finish_what_the_host_knows() {
  State& all = state();
  for (auto& stream : all.streams) {
    while (!stream.late_copies.empty() && covers(all.host, *stream.late_copies.front()->launch)) {
      finish(stream.late_copies.front());
      stream.late_copies.pop_front();
    }
  }
}

// ---- Accesses -------------------------------------------------------------------------------------------------------

bool overlap(const Access& access, const Use& use) { return access.begin < use.end && use.begin < access.end; }

void check_conflicts(const Use& use, const Launch& launch, const Clock& clock) {
  for (const Access& before : use.memory->accesses) {
    if (!(before.write || use.write) || !overlap(before, use) || covers(clock, *before.launch)) continue;
    found(describe(launch) + (use.write ? " writes " : " reads ") + describe(*use.memory) + ", which " +
          describe(*before.launch) + (before.write ? " writes" : " reads") +
          ", and nothing orders the two: wait for the stream, or for an event that was recorded on it");
    return;
  }
}

// Many small pieces, as of a buffer that is filled slice by slice: those of one stream and kind become one that spans
// them, at the time of the last.
void merge(std::vector<Access>& accesses) {
  std::map<std::pair<int, bool>, Access> merged;
  for (const Access& access : accesses) {
    auto [place, is_new] = merged.try_emplace({access.launch->stream, access.write}, access);
    if (is_new) continue;
    Access& one = place->second;
    one.begin = std::min(one.begin, access.begin);
    one.end = std::max(one.end, access.end);
    if (access.launch->time > one.launch->time) one.launch = access.launch;
  }
  accesses.clear();
  for (auto& [key, access] : merged) accesses.push_back(access);
}

void note(const Use& use, const LaunchPtr& launch, const Clock& clock) {
  auto& accesses = use.memory->accesses;
  // What is ordered before this use and covered by it need not be remembered: whoever is ordered after this use is
  // ordered after that too. What the host has waited for is before everything that will be launched.
  auto obsolete = [&](const Access& before) {
    if (covers(state().host, *before.launch)) return true;
    const bool covered = use.begin <= before.begin && before.end <= use.end;
    return covered && (use.write || !before.write) && covers(clock, *before.launch);
  };
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(), obsolete), accesses.end());
  accesses.push_back({use.begin, use.end, use.write, launch});
  if (accesses.size() > kMaxAccesses) merge(accesses);
}

void check_freed(const Memory& memory) {
  Clock clock = state().streams[memory.stream].clock;
  join(clock, state().host);
  for (const Access& access : memory.accesses) {
    const Launch& launch = *access.launch;
    if (covers(clock, launch) || memory.recorded_streams.count(launch.stream)) continue;
    found(describe(memory) + ", allocated on " + stream_name(memory.stream) + ", was freed while " + describe(launch) +
          " may still be using it: call record_stream, or let " + stream_name(memory.stream) + " wait for it first");
    return;
  }
}

}  // namespace

std::string stream_name(int stream) {
  const int id = stream % kStreamsPerDevice, device = device_of(stream);
  return (id ? "stream " + std::to_string(id) : "the default stream") + " of sim:" + std::to_string(device);
}

int device_count() { return state().devices; }
bool races_are_errors() { return state().races; }
void set_races_are_errors(bool value) {
  Lock lock(state().lock);
  state().races = value;
  state().fault.clear();
}

Memory* new_memory(std::shared_ptr<void> owner, void* data, size_t nbytes, int device, int stream) {
  State& all = state();
  Lock lock(all.lock);
  auto* bytes = static_cast<char*>(data);
  auto* memory = new Memory{std::move(owner), bytes, nbytes, device, stream, ++all.memories, {}, {}, {}};
  if (device == kPinnedHost) {
    all.pinned[bytes] = memory;
  } else if (const uint64_t now = all.streams[stream].clock[stream]; now > all.host[stream]) {
    // As of a caching allocator: work that the stream was given before may still be using the bytes.
    memory->accesses.push_back({0, nbytes, true, std::make_shared<const Launch>(Launch{"earlier work", stream, now})});
  }
  return memory;
}

void free_memory(void* pointer) noexcept {
  auto* memory = static_cast<Memory*>(pointer);
  {
    Lock lock(state().lock);
    const auto copies = memory->late_copies;
    if (memory->device == kPinnedHost) {
      // As the caching host allocator of CUDA: the block is reused only when its copies are done.
      for (const auto& copy : copies) finish(copy);
      state().pinned.erase(memory->data);
    } else {
      check_freed(*memory);
      for (const auto& copy : copies) copy->device = nullptr;
    }
  }
  delete memory;
}

void record_stream(Memory& memory, int stream) {
  Lock lock(state().lock);
  memory.recorded_streams.insert(stream);
}

Memory* find_pinned(const void* data) {
  State& all = state();
  Lock lock(all.lock);
  const auto* byte = static_cast<const char*>(data);
  auto after = all.pinned.upper_bound(byte);
  if (after == all.pinned.begin()) return nullptr;
  Memory* memory = std::prev(after)->second;
  return byte < memory->data + memory->nbytes ? memory : nullptr;
}

LaunchPtr launch(const std::string& name, int stream, const std::vector<Use>& uses) {
  State& all = state();
  Lock lock(all.lock);
  raise_fault();
  Clock& clock = all.streams[stream].clock;
  join(clock, all.host);
  auto now = std::make_shared<const Launch>(Launch{name, stream, ++clock[stream]});
  for (const Use& use : uses) check_conflicts(use, *now, clock);
  raise_fault();
  ++all.kernels[name];
  for (const Use& use : uses) {
    const auto copies = use.memory->late_copies;
    for (const auto& copy : copies) {
      // Device memory: the kernel needs what the copy brings. Pinned memory: the next copy changes or needs its bytes.
      if (use.memory->device != kPinnedHost) move_bytes(*copy);
      else if (use.write || copy->to_host) finish(copy);
    }
    note(use, now, clock);
  }
  raise_fault();
  return now;
}

void note_output(Memory& memory, const LaunchPtr& launch) {
  Lock lock(state().lock);
  memory.accesses.push_back({0, memory.nbytes, true, launch});
}

void add_late_copy(LateCopy given) {
  take_time();
  Lock lock(state().lock);
  auto copy = std::make_shared<LateCopy>(std::move(given));
  if (copy->to_host) std::memset(copy->host_data, kPoison, copy->values.size());
  copy->host->late_copies.push_back(copy);
  if (copy->device) copy->device->late_copies.push_back(copy);
  state().streams[copy->launch->stream].late_copies.push_back(copy);
}

std::mutex& running(int stream) { return state().streams[stream].running; }

Clock clock_of(int stream) {
  Lock lock(state().lock);
  Clock clock = state().streams[stream].clock;
  join(clock, state().host);
  return clock;
}

void wait(int stream, const Clock& clock) {
  Lock lock(state().lock);
  join(state().streams[stream].clock, clock);
}

void set_seed(int seed) {
  Lock lock(state().lock);
  state().seed = seed;
  state().random.seed(static_cast<uint32_t>(seed));
}

void take_time() {
  int64_t microseconds;
  {
    Lock lock(state().lock);
    if (!state().seed) return;
    const uint32_t drawn = state().random();
    microseconds = drawn % 4 ? 0 : drawn / 4 % 3000;  // most work is done at once
  }
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

void host_wait(const Clock& clock) {
  take_time();
  Lock lock(state().lock);
  join(state().host, clock);
  finish_what_the_host_knows();
  raise_fault();
}

void host_wait_stream(int stream) { host_wait(clock_of(stream)); }

void host_wait_device(int device) {
  Clock clock(state().host.size(), 0);
  for (int id = 0; id < kStreamsPerDevice; ++id) join(clock, clock_of(stream_of(device, id)));
  host_wait(clock);
}

void count(const std::string& name, int64_t amount) {
  Lock lock(state().lock);
  state().counts[name] += amount;
}

std::map<std::string, int64_t> counts() {
  Lock lock(state().lock);
  return state().counts;
}

std::map<std::string, int64_t> kernel_counts() {
  Lock lock(state().lock);
  return state().kernels;
}

void reset_counts() {
  Lock lock(state().lock);
  state().counts.clear();
  state().kernels.clear();
}

}  // namespace sim
