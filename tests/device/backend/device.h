// What the device's collectives and its Python module need of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <functional>

namespace trial {

// The same bytes as a tensor of the host; a tensor of the host as it is.
at::Tensor on_host(const at::Tensor& tensor);

// As on Ascend: abort() reaches no waiting collective, and the device is stopped instead (TRIAL_STOPS=1).
bool ends_by_stop();
bool has_stopped();

// Runs when the present stream comes to it: before the next operation or copy on that stream.
void add_to_stream(std::function<void()> task);

void add_device(pybind11::module_& module);
void add_collectives(pybind11::module_& module);

}  // namespace trial
