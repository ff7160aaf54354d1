// Copies from, to and within the device `sim`, and `Tensor.item`.
//
// What CUDA does: a copy with non_blocking=True between device memory and pinned memory is work of the current stream,
// and the host goes on. Any other copy from the device makes the host wait for the current stream, and so does any copy
// to the device with non_blocking=False. A copy to the device from pageable memory with non_blocking=True reads its
// source before the host goes on, but the host does not wait for the stream. Tensors that differ in dtype or layout are
// first converted into pageable memory.
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "device.h"

namespace sim {
namespace {

// Whether the copy is one of bytes in a row.
bool is_plain(const at::Tensor& source, const at::Tensor& target) {
  const bool same_order = (source.is_contiguous() && target.is_contiguous()) ||
                          (source.strides() == target.strides() && target.is_non_overlapping_and_dense());
  return same_order && source.dtype() == target.dtype() && source.is_conj() == target.is_conj() &&
         source.is_neg() == target.is_neg();
}

char* bytes_of(const at::Tensor& tensor) { return static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())); }

// Whether the copy is left to be done late.
bool copy_late(const at::Tensor& source, const at::Tensor& target, const LaunchPtr& launch) {
  const bool to_host = is_sim(source);
  const at::Tensor &host = to_host ? target : source, &device = to_host ? source : target;
  Memory* pinned = find_pinned(host.const_data_ptr());
  if (!pinned || !is_plain(source, target)) return false;
  const char* values = bytes_of(source);
  add_late_copy({launch, pinned, to_host ? nullptr : memory_of(device.storage()), bytes_of(host), bytes_of(device),
                 to_host, std::vector<char>(values, values + source.nbytes())});
  return true;
}

void copy_to_device(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const int stream = current_stream(target.device().index());
  std::vector<Use> uses;
  add_use(uses, target, true);
  add_use(uses, source, false);
  const std::lock_guard<std::mutex> lock(running(stream));
  const auto launched = launch("copy to the device", stream, uses);
  count("to_device_bytes", target.nbytes());
  if (non_blocking && target.numel() && copy_late(source, target, launched)) return count("to_device_non_blocking");
  host_tensor(target).copy_(source);
  count(non_blocking ? "to_device_staged" : "to_device_blocking");
  if (!non_blocking) host_wait_stream(stream);
}

void copy_to_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const int stream = current_stream(source.device().index());
  std::vector<Use> uses;
  add_use(uses, source, false);
  add_use(uses, target, true);
  const std::lock_guard<std::mutex> lock(running(stream));
  const auto launched = launch("copy to the host", stream, uses);
  count("to_host_bytes", source.nbytes());
  if (non_blocking && source.numel() && copy_late(source, target, launched)) return count("to_host_non_blocking");
  count("to_host_blocking");
  host_wait_stream(stream);
  target.copy_(host_tensor(source));
}

// Work of the source's stream. Between two devices that stream and the target's wait for each other.
void copy_on_device(const at::Tensor& source, const at::Tensor& target) {
  const int stream = current_stream(source.device().index());
  const int other = current_stream(target.device().index());
  std::vector<Use> uses;
  add_use(uses, source, false);
  add_use(uses, target, true);
  const std::lock_guard<std::mutex> lock(running(stream));
  if (other != stream) {
    wait(stream, clock_of(other));
    count("between_devices");
    count("between_devices_bytes", source.nbytes());
  } else {
    count("kernels");
  }
  launch("copy", stream, uses);
  host_tensor(target).copy_(host_tensor(source));
  if (other != stream) wait(other, clock_of(stream));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  const auto source = self.sizes() == target.sizes() ? self : self.expand_as(target);
  if (is_sim(source) && is_sim(target)) {
    copy_on_device(source, target);
  } else if (is_sim(target)) {
    TORCH_CHECK(source.is_cpu(), "cannot copy from ", source.device(), " to ", target.device());
    copy_to_device(source, target, non_blocking);
  } else {
    TORCH_CHECK(target.is_cpu(), "cannot copy from ", source.device(), " to ", target.device());
    copy_to_host(source, target, non_blocking);
  }
  return target;
}

at::Scalar item(const at::Tensor& self) {
  const int stream = current_stream(self.device().index());
  std::vector<Use> uses;
  add_use(uses, self, false);
  const std::lock_guard<std::mutex> lock(running(stream));
  launch("item", stream, uses);
  count("synchronize_item");
  host_wait_stream(stream);
  return host_tensor(self).item();
}

}  // namespace
}  // namespace sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", sim::copy_from);
  m.impl("_local_scalar_dense", sim::item);
}
