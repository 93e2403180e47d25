// What the device's collectives and its Python module need of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

namespace trial {

// The same bytes as a tensor of the host; a tensor of the host as it is.
at::Tensor on_host(const at::Tensor& tensor);

// As on Ascend: abort() reaches no waiting collective, and the device is stopped instead (TRIAL_STOPS=1).
bool ends_by_stop();
bool has_stopped();

void add_device(pybind11::module_& module);
void add_collectives(pybind11::module_& module);

}  // namespace trial
