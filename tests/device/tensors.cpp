// Tensors of the device `sim`: new ones, views, resized ones, and CPU tensors over their memory.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "device.h"

namespace sim {
namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

std::atomic<bool> g_float64{std::getenv("SIM_NO_F64") == nullptr || !std::strcmp(std::getenv("SIM_NO_F64"), "0")};

using MaybeDtype = std::optional<at::ScalarType>;
using MaybeLayout = std::optional<at::Layout>;
using MaybeDevice = std::optional<at::Device>;
using MaybeBool = std::optional<bool>;
using MaybeFormat = std::optional<at::MemoryFormat>;

c10::DeviceGuard guard_for(MaybeDtype dtype, MaybeDevice device, MaybeBool pinned) {
  check_dtype(c10::dtype_or_default(dtype));
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  return c10::DeviceGuard(device.value_or(c10::Device(kSim)));
}

at::Tensor empty(at::IntArrayRef sizes, MaybeDtype dtype, MaybeLayout, MaybeDevice device, MaybeBool pinned,
                 MaybeFormat format) {
  const auto guard = guard_for(dtype, device, pinned);
  return at::detail::empty_generic(sizes, &allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, MaybeDtype dtype, MaybeLayout,
                         MaybeDevice device, MaybeBool pinned) {
  const auto guard = guard_for(dtype, device, pinned);
  return at::detail::empty_strided_generic(sizes, strides, &allocator(), kKeys, c10::dtype_or_default(dtype));
}

at::Tensor zeros(at::IntArrayRef sizes, MaybeDtype dtype, MaybeLayout layout, MaybeDevice device, MaybeBool pinned) {
  return at::zeros(sizes, dtype, layout, device, pinned);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, MaybeFormat format) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(sizes);
  const auto nbytes = at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), self.storage_offset());
  if (nbytes > self.storage().nbytes()) resize_storage(self.storage(), nbytes);
  if (format.has_value()) tensor->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  TORCH_CHECK(source.device_type() == kSim, "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", source.device(), "\"");
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  tensor->set_storage_offset(offset);
  if (strides.size() == sizes.size() && !sizes.empty()) tensor->set_sizes_and_strides(sizes, strides);
  else tensor->set_sizes_contiguous(sizes);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {numel}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &allocator(), true), 0, {0}, {});
}

void record_tensor_stream(at::Tensor& self, c10::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

at::Tensor view_dtype(const at::Tensor& self, at::ScalarType dtype) {
  check_dtype(dtype);
  return at::native::view_dtype(self, dtype);
}

// The byte after the last one of a tensor, from the beginning of its storage.
size_t end_of(const at::Tensor& tensor) {
  int64_t last = tensor.storage_offset();
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return (last + 1) * tensor.itemsize();
}

}  // namespace

bool has_float64() { return g_float64; }

void check_dtype(c10::ScalarType dtype) {
  TORCH_CHECK_TYPE(g_float64 || (dtype != at::kDouble && dtype != at::kComplexDouble),
                   "Cannot convert a SIM Tensor to float64 dtype as this device (like MPS) doesn't support float64. "
                   "Please use float32 instead.");
}

void resize_storage(const c10::Storage& storage, size_t nbytes) {
  const c10::DeviceGuard guard(storage.device());
  auto fresh = allocator().allocate(nbytes);
  const size_t kept = std::min(nbytes, storage.nbytes());
  if (kept) {
    Memory* from = memory_of(storage);
    Memory* to = static_cast<Memory*>(fresh.get_context());
    launch("resize", current_stream(storage.device().index()), {{from, 0, kept, false}, {to, 0, kept, true}});
    std::memcpy(fresh.get(), storage.data(), kept);
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(nbytes);
}

void add_use(std::vector<Use>& uses, const at::Tensor& tensor, bool write) {
  if (!tensor.numel()) return;
  Memory* memory = is_sim(tensor) ? memory_of(tensor.storage()) : find_pinned(tensor.const_data_ptr());
  if (!memory) return;
  const auto* start = static_cast<const char*>(tensor.storage().data());
  const size_t shift = start - memory->data;  // pinned memory may be seen through a storage that begins inside it
  uses.push_back({memory, shift + tensor.storage_offset() * tensor.itemsize(), shift + end_of(tensor), write});
}

at::Tensor tensor_over(c10::Storage storage, const at::Tensor& like) {
  check_dtype(like.scalar_type());
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), kKeys, like.dtype());
  tensor.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  tensor._set_conj(like.is_conj());
  tensor._set_neg(like.is_neg());
  return tensor;
}

c10::Storage host_storage(const c10::Storage& storage) {
  c10::DataPtr data(const_cast<void*>(storage.data()), c10::Device(c10::kCPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
}

at::Tensor host_tensor(const at::Tensor& like, c10::Storage storage) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                         like.dtype());
  tensor.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  tensor._set_conj(like.is_conj());
  tensor._set_neg(like.is_neg());
  return tensor;
}

at::Tensor host_tensor(const at::Tensor& tensor) { return host_tensor(tensor, host_storage(tensor.storage())); }

}  // namespace sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", sim::empty);
  m.impl("empty_strided", sim::empty_strided);
  m.impl("_efficientzerotensor", sim::zeros);
  m.impl("resize_", sim::resize);
  m.impl("set_", sim::set_nothing);
  m.impl("set_.source_Storage", sim::set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", sim::set_storage);
  m.impl("set_.source_Tensor", sim::set_tensor);
  m.impl("record_stream", sim::record_tensor_stream);
  // Views touch no memory.
  m.impl("as_strided", sim::as_strided);
  m.impl("view", at::native::view);
  m.impl("view.dtype", sim::view_dtype);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
}

TORCH_LIBRARY_FRAGMENT(sim, m) {
  m.def("set_float64(bool supported) -> ()", [](bool supported) { sim::g_float64 = supported; });
}
