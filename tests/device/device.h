// Shared by the parts of the device `sim` that know torch: tensors of the device, their memory, CPU tensors over it.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include "ordering.h"

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

inline bool is_sim(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// The current device and streams of the calling thread.
int current_device();
int current_stream(int device);
int index_of(c10::Device device);  // the current device if the device has no index

// Whether the device has float64: MPS has none. `check_dtype` throws TypeError, as MPS does.
bool has_float64();
void check_dtype(c10::ScalarType dtype);

// Memory.
c10::DeviceAllocator& allocator();
// Bytes of the host become memory of the device; `owner` frees them.
c10::DataPtr adopt(std::shared_ptr<void> owner, void* data, size_t nbytes, int device);
Memory* memory_of(const c10::Storage& storage);  // null if the storage is empty
void resize_storage(const c10::Storage& storage, size_t nbytes);
// The use of a tensor of the device or in pinned memory; nothing for other tensors.
void add_use(std::vector<Use>& uses, const at::Tensor& tensor, bool write);

// A tensor of the device over a storage, with sizes and strides of another tensor.
at::Tensor tensor_over(c10::Storage storage, const at::Tensor& like);
// A CPU tensor over the memory of a tensor of the device. It owns nothing.
at::Tensor host_tensor(const at::Tensor& tensor);
at::Tensor host_tensor(const at::Tensor& tensor, c10::Storage storage);
c10::Storage host_storage(const c10::Storage& storage);

// Random numbers.
const at::Generator& default_generator(int device);
at::Generator host_generator(const at::Generator& generator);  // with which CPU kernels draw the numbers of this one

// Whether programs see the device. Hidden, it can be used by its name all the same.
bool is_visible();
void set_visible(bool visible);

}  // namespace sim
