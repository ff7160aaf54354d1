// Memory, current device, streams, events and random numbers of the device `sim`, as torch asks for them.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/error.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>

#include "device.h"

namespace sim {
namespace {

constexpr size_t kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

thread_local int t_device = 0;
thread_local std::vector<int64_t> t_streams;  // id of the current stream of each device; all 0 in a new thread

std::atomic<bool> g_visible{true};

c10::Device sim_device(int index) { return c10::Device(kSim, static_cast<c10::DeviceIndex>(index)); }

int64_t& current_stream_id(int index) {
  if (t_streams.empty()) t_streams.assign(device_count(), 0);
  return t_streams.at(index);
}

int checked(int index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "there is no device sim:", index, ": there are ", device_count());
  return index;
}

int stream_of(const c10::Stream& stream) { return sim::stream_of(index_of(stream.device()), stream.id()); }

// ---- Memory ---------------------------------------------------------------------------------------------------------

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    auto owner = std::make_shared<c10::DataPtr>(c10::GetCPUAllocator()->allocate(nbytes));
    void* data = owner->get();
    return adopt(std::move(owner), data, nbytes, current_device());
  }
  // `owner` keeps the bytes; from now on they are memory of the device.
  c10::DataPtr adopt(std::shared_ptr<void> owner, void* data, size_t nbytes, int index) {
    if (!nbytes) return {nullptr, sim_device(index)};
    {
      std::lock_guard<std::mutex> lock(lock_);
      auto& stats = stats_.at(index);
      if (stats.allocated_bytes[kAll].current + static_cast<int64_t>(nbytes) > limit_) {
        ++stats.num_ooms;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "sim:", index, " out of memory: tried to allocate ", nbytes,
                         " bytes, ", stats.allocated_bytes[kAll].current, " of ", limit_, " bytes are allocated");
      }
      for (auto* stat : {&stats.allocation, &stats.active}) (*stat)[kAll].increase(1);
      for (auto* stat : bytes_of(stats)) (*stat)[kAll].increase(nbytes);
    }
    auto* memory = new_memory(std::move(owner), data, nbytes, index, current_stream(index));
    return {data, memory, &Allocator::release, sim_device(index)};
  }
  static void release(void* pointer);
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }  // the context of a pointer is not the pointer
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (auto* memory = pointer.cast_context<Memory>(&Allocator::release)) record_stream(*memory, stream_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> lock(lock_);
    return stats_.at(checked(index));
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    for_all(index, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    for_all(index, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    return {limit_ - getDeviceStats(index).allocated_bytes[kAll].current, limit_};
  }

 private:
  static std::array<c10::CachingAllocator::StatArray*, 4> bytes_of(c10::CachingDeviceAllocator::DeviceStats& stats) {
    return {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes};
  }
  template <typename Change>
  void for_all(c10::DeviceIndex index, Change change) {
    std::lock_guard<std::mutex> lock(lock_);
    auto& stats = stats_.at(checked(index));
    for (auto* stat : {&stats.allocation, &stats.active}) change((*stat)[kAll]);
    for (auto* stat : bytes_of(stats)) change((*stat)[kAll]);
  }
  static int64_t limit() {
    const char* text = std::getenv("SIM_MEMORY_BYTES");
    return text ? std::atoll(text) : static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
  }

  std::mutex lock_;
  int64_t limit_ = limit();
  std::vector<c10::CachingDeviceAllocator::DeviceStats> stats_{static_cast<size_t>(device_count())};
};

Allocator& device_allocator() {
  static auto* only = new Allocator;
  return *only;
}

void Allocator::release(void* pointer) {
  auto* memory = static_cast<Memory*>(pointer);
  auto& self = device_allocator();
  {
    std::lock_guard<std::mutex> lock(self.lock_);
    auto& stats = self.stats_.at(memory->device);
    for (auto* stat : {&stats.allocation, &stats.active}) (*stat)[kAll].decrease(1);
    for (auto* stat : bytes_of(stats)) (*stat)[kAll].decrease(memory->nbytes);
  }
  free_memory(pointer);
}

// Page-locked host memory.
class PinnedAllocator final : public c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (!nbytes) return {nullptr, c10::Device(c10::kCPU)};
    auto owner = std::make_shared<c10::DataPtr>(c10::GetCPUAllocator()->allocate(nbytes));
    void* data = owner->get();
    return {data, new_memory(std::move(owner), data, nbytes, kPinnedHost, 0), &free_memory, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
};

// ---- Random numbers -------------------------------------------------------------------------------------------------

// A generator of the device. Its numbers come from a CPU generator of its own, with another seed than it was given: the
// same seed draws other numbers here than on the CPU, as on every real accelerator.
class GeneratorImpl final : public c10::GeneratorImpl {
 public:
  explicit GeneratorImpl(int index, at::Generator inner)
      : c10::GeneratorImpl(sim_device(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner_(std::move(inner)) {}

  static at::Generator make(int index, uint64_t seed) {
    auto inner = at::make_generator<at::CPUGeneratorImpl>(seed ^ kOtherSeed);
    return at::make_generator<GeneratorImpl>(index, inner);
  }
  at::Generator inner() const { return inner_; }

  void set_current_seed(uint64_t seed) override { inner_.set_current_seed(seed ^ kOtherSeed); }
  uint64_t current_seed() const override { return inner_.current_seed() ^ kOtherSeed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return current_seed();
  }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "generators of sim have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "generators of sim have no offset"); }
  void set_state(const c10::TensorImpl& state) override { inner_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  static constexpr uint64_t kOtherSeed = 0x9E3779B9;
  GeneratorImpl* clone_impl() const override { return new GeneratorImpl(device().index(), inner_.clone()); }
  at::Generator inner_;
};

// ---- Devices, streams and events ------------------------------------------------------------------------------------

struct Event {
  int device;
  Clock clock;
  std::chrono::steady_clock::time_point when;
};

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device wanted) const override {
    const int before = t_device;
    t_device = checked(index_of(wanted));
    return sim_device(before);
  }
  c10::Device getDevice() const override { return sim_device(t_device); }
  void setDevice(c10::Device wanted) const override { t_device = checked(index_of(wanted)); }
  void uncheckedSetDevice(c10::Device wanted) const noexcept override { t_device = index_of(wanted); }
  // All devices, also while they are hidden: autograd makes its threads once for a process, and asks here.
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    c10::DeviceCapability all;
    all.capability_data.supported_scalar_types.has_Double = has_float64();
    all.capability_data.supported_scalar_types.has_ComplexDouble = has_float64();
    return all;
  }

  c10::Stream getStream(c10::Device where) const override {
    return stream(index_of(where), current_stream_id(index_of(where)));
  }
  c10::Stream getDefaultStream(c10::Device where) const override { return stream(index_of(where), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device where, bool) const override { return getNewStream(where, 0); }
  // A pool, as CUDA's: the 33rd stream is the first one again.
  c10::Stream getNewStream(c10::Device where, int) const override {
    static std::atomic<uint64_t> made{0};
    return stream(checked(index_of(where)), 1 + made++ % (kStreamsPerDevice - 1));
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const int index = index_of(next.device());
    return stream(index, std::exchange(current_stream_id(index), next.id()));
  }
  void* getStreamNativeHandle(const c10::Stream wanted) const override { return &running(stream_of(wanted)); }
  bool queryStream(const c10::Stream& asked) const override {
    host_wait_stream(stream_of(asked));  // by now the device has had the time
    return true;
  }
  void synchronizeStream(const c10::Stream& asked) const override {
    count("synchronize_stream");
    host_wait_stream(stream_of(asked));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    count("synchronize_device");
    host_wait_device(checked(index < 0 ? t_device : index));
  }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {index_of(on.device()), clock_of(stream_of(on)), std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& on) const override {
    wait(stream_of(on), static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    host_wait(static_cast<Event*>(event)->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    count("synchronize_event");
    if (static_cast<Event*>(event)->device != t_device) count("synchronize_elsewhere");
    host_wait(static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const auto spent = static_cast<Event*>(to)->when - static_cast<Event*>(from)->when;
    return std::chrono::duration<double, std::milli>(spent).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& on) const override {
    device_allocator().recordStream(pointer, on);
  }

 private:
  static c10::Stream stream(int index, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, sim_device(index), id); }
};

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return is_visible(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(is_visible() ? device_count() : 0);
  }
  void setCurrentDevice(c10::DeviceIndex index) const override { t_device = checked(index); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(t_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(t_device, checked(index)));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override { return data && find_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* only = new PinnedAllocator;
    return only;
  }
  c10::Device getDeviceFromPtr(void*) const override { return sim_device(t_device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index < 0 ? t_device : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return GeneratorImpl::make(checked(index < 0 ? t_device : index), c10::default_rng_seed_val);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage, nbytes);
  }
};

const bool g_registered = [] {
  c10::impl::registerDeviceGuard(kSim, new Guard);
  c10::SetAllocator(kSim, &device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

int current_device() { return t_device; }
int current_stream(int index) { return sim::stream_of(index, current_stream_id(index)); }
int index_of(c10::Device where) { return where.has_index() ? where.index() : t_device; }
bool is_visible() { return g_visible; }
void set_visible(bool visible) { g_visible = visible; }

c10::DeviceAllocator& allocator() { return device_allocator(); }
c10::DataPtr adopt(std::shared_ptr<void> owner, void* data, size_t nbytes, int index) {
  return device_allocator().adopt(std::move(owner), data, nbytes, index);
}
Memory* memory_of(const c10::Storage& storage) {
  return storage.data_ptr().cast_context<Memory>(&Allocator::release);
}

const at::Generator& default_generator(int index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < device_count(); ++i) made->push_back(GeneratorImpl::make(i, c10::default_rng_seed_val));
    return made;
  }();
  return all->at(checked(index));
}
at::Generator host_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kSim, "Expected a 'sim' device type for generator but found '",
              generator.device().type(), "'");
  return static_cast<GeneratorImpl*>(generator.unsafeGetGeneratorImpl())->inner();
}

}  // namespace sim
