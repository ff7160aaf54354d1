// Operators of the device `sim`: each runs torch's CPU kernel on CPU tensors over the memory of the device.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

#include <atomic>
#include <tuple>

#include "device.h"

namespace sim {
namespace {

// Operators that may be given indices on the CPU, as on CUDA: the indices are copied to the device first.
const std::set<std::string> kTakesHostIndices = {"aten::_index_put_impl_", "aten::index.Tensor_out"};

// The arguments of one operator on their way to a CPU kernel, and its results on their way back.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), schema_(op.schema()), stack_(stack), name_(op.schema().name()) {
    if (!schema_.overload_name().empty()) name_ += "." + schema_.overload_name();
    returns_view_ = false;
    for (const auto& result : schema_.returns()) {
      returns_view_ |= result.alias_info() && !result.alias_info()->isWrite();
    }
  }

  void run() {
    const size_t n_arguments = schema_.arguments().size();
    auto arguments = torch::jit::last(stack_, n_arguments);
    device_ = find_device(arguments);
    const int stream = current_stream(device_);
    std::vector<at::IValue> converted;
    for (size_t i = 0; i < n_arguments; ++i) converted.push_back(argument(arguments[i], schema_.arguments()[i]));
    torch::jit::drop(stack_, n_arguments);
    for (auto& value : converted) stack_.push_back(std::move(value));

    const std::lock_guard<std::mutex> lock(running(stream));
    if (!returns_view_) {
      launch_ = launch(name_, stream, uses_);
      count("kernels");
    }
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    for (auto& [tensor, host] : written_) take_over(tensor, host);
    const size_t n_returns = schema_.returns().size();
    for (size_t i = stack_.size() - n_returns; i < stack_.size(); ++i) stack_[i] = result(stack_[i]);

    // The host has to know a number of the device before it can go on.
    const bool waits = op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output);
    if (waits && !kTakesHostIndices.count(name_)) {
      count("synchronize_shape");
      host_wait_stream(stream);
    }
  }

 private:
  template <typename Values>
  static int find_device(const Values& arguments) {
    std::optional<int> named;
    for (const auto& value : arguments) {
      if (value.isTensor() && is_sim(value.toTensor())) return value.toTensor().device().index();
      if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorVector()) {
          if (is_sim(tensor)) return tensor.device().index();
        }
      }
      if (value.isDevice()) named = index_of(value.toDevice());
    }
    return named.value_or(current_device());
  }

  at::IValue argument(const at::IValue& value, const c10::Argument& formal) {
    const bool write = formal.alias_info() && formal.alias_info()->isWrite();
    if (value.isTensor()) return host(value.toTensor(), formal, write, /*is_number=*/value.toTensor().dim() == 0);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(host(tensor, formal, write, false));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional(host(*tensor, formal, write, kTakesHostIndices.count(name_))) : tensor);
      }
      return list;
    }
    if (value.isDevice()) return c10::Device(c10::kCPU);
    if (value.isGenerator()) return host_generator(value.toGenerator());
    if (value.isNone() && formal.type()->str() == "Generator?") return host_generator(default_generator(device_));
    if (formal.name() == "dtype" && value.isInt()) check_dtype(static_cast<c10::ScalarType>(value.toInt()));
    return value;
  }

  // `may_be_on_host`: of a number without dimensions, or of an index.
  at::Tensor host(const at::Tensor& tensor, const c10::Argument& formal, bool write, bool may_be_on_host) {
    if (!tensor.defined()) return tensor;
    if (!is_sim(tensor) && tensor.is_cpu() && may_be_on_host && !write) {
      if (tensor.dim()) count("to_device_blocking");
      return tensor;
    }
    TORCH_CHECK(is_sim(tensor) && tensor.device().index() == device_,
                "Expected all tensors to be on the same device, but found at least two devices, sim:", device_, " and ",
                tensor.device(), "! (when checking argument for argument ", formal.name(), " in method ", name_, ")");
    if (!returns_view_) add_use(uses_, tensor, write);
    for (auto& [known, host] : tensors_) {
      if (known.is_same(tensor)) return host;
    }
    auto made = host_tensor(tensor, host_storage_of(tensor.storage()));
    tensors_.emplace_back(tensor, made);
    if (write) written_.emplace_back(tensor, made);
    return made;
  }

  // One for all tensors that share a storage, so that CPU kernels see what overlaps.
  c10::Storage host_storage_of(const c10::Storage& storage) {
    for (auto& [known, host] : storages_) {
      if (known.is_alias_of(storage)) return host;
    }
    storages_.emplace_back(storage, host_storage(storage));
    return storages_.back().second;
  }

  // A kernel may have given an output other sizes, and other memory.
  void take_over(const at::Tensor& tensor, const at::Tensor& host) {
    if (host.storage().data() != tensor.storage().data()) {
      const size_t nbytes = host.storage().nbytes();
      c10::DataPtr nothing(nullptr, c10::Device(c10::kCPU));
      auto owner = std::make_shared<c10::DataPtr>(host.storage().set_data_ptr(std::move(nothing)));
      void* data = owner->get();
      tensor.storage().set_data_ptr_noswap(adopt(std::move(owner), data, nbytes, device_));
      tensor.storage().set_nbytes(nbytes);
      if (Memory* memory = memory_of(tensor.storage())) note_output(*memory, launch_);
    }
    if (host.sizes() != tensor.sizes() || host.strides() != tensor.strides()) {
      tensor.unsafeGetTensorImpl()->set_storage_offset(host.storage_offset());
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
    }
  }

  at::IValue result(const at::IValue& value) {
    if (value.isTensor()) return device_tensor(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(device_tensor(tensor));
    return list;
  }

  at::Tensor device_tensor(const at::Tensor& host) {
    if (!host.defined()) return host;
    for (auto& [tensor, known] : tensors_) {
      if (known.is_same(host)) return tensor;
    }
    for (auto& [storage, known] : storages_) {
      if (known.is_alias_of(host.storage())) return tensor_over(storage, host);
    }
    check_dtype(host.scalar_type());
    const size_t nbytes = host.storage().nbytes();
    auto owner = std::make_shared<c10::Storage>(host.storage());
    void* data = const_cast<void*>(host.storage().data());
    c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, adopt(std::move(owner), data, nbytes, device_),
                         &allocator(), true);
    if (Memory* memory = memory_of(storage)) note_output(*memory, launch_);
    storages_.emplace_back(storage, host.storage());
    return tensor_over(storage, host);
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  std::string name_;
  bool returns_view_;  // a view touches no memory
  int device_ = 0;
  LaunchPtr launch_;
  std::vector<Use> uses_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_, written_;  // of the device, and the CPU tensor for it
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, *stack).run(); }

// torch's CPU kernel would draw from the generator of the CPU.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (p == 0 || !train.value_or(true)) return {input.mul(1), at::ones_like(input, input.options().dtype(at::kBool))};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0. : 1 / (1 - p)), mask};
}

std::atomic<bool> fuses_grouped_attention{true};

// The same choice as on the CPU, whose kernel `run_on_cpu` then finds.
int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool grouped) {
  constexpr int64_t math = 0;
  if ((mask && mask->requires_grad()) || (grouped && !fuses_grouped_attention)) return math;
  const auto host = [](const at::Tensor& tensor) { return is_sim(tensor) ? host_tensor(tensor) : tensor; };
  const auto host_mask = mask ? std::optional(host(*mask)) : mask;
  return at::_fused_sdp_choice(host(query), host(key), host(value), host_mask, dropout, causal, scale, grouped);
}

c10::Dict<std::string, int64_t> as_dict(const std::map<std::string, int64_t>& counts) {
  c10::Dict<std::string, int64_t> dict;
  for (const auto& [name, number] : counts) dict.insert(name, number);
  return dict;
}

}  // namespace
}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose_attention)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::run_on_cpu>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_dropout", sim::native_dropout);
  m.impl("_fused_sdp_choice", sim::choose_attention);
  // For a device without kernels of its own torch composes these from other operators, with other roundings than those
  // of the CPU's kernels.
  for (const char* name : {"addr", "addr.out", "linalg__powsum", "mish_backward", "native_group_norm",
                           "native_layer_norm", "silu_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&sim::run_on_cpu>());
  }
}

// What `torch.sim` calls.
TORCH_LIBRARY_FRAGMENT(sim, m) {
  m.def("device_count() -> int", [] { return static_cast<int64_t>(sim::is_visible() ? sim::device_count() : 0); });
  m.def("set_visible(bool visible) -> ()", [](bool visible) { sim::set_visible(visible); });
  m.def("set_races(bool are_errors) -> ()", [](bool are_errors) { sim::set_races_are_errors(are_errors); });
  m.def("set_grouped_attention(bool is_fused) -> ()",
        [](bool is_fused) { sim::fuses_grouped_attention = is_fused; });
  m.def("set_seed(int seed) -> ()", [](int64_t seed) { sim::set_seed(static_cast<int>(seed)); });
  m.def("default_generator(int device) -> Generator?",
        [](int64_t device) { return std::optional(sim::default_generator(static_cast<int>(device))); });
  m.def("counts() -> Dict(str, int)", [] { return sim::as_dict(sim::counts()); });
  m.def("kernel_counts() -> Dict(str, int)", [] { return sim::as_dict(sim::kernel_counts()); });
  m.def("reset_counts() -> ()", [] { sim::reset_counts(); });
}
