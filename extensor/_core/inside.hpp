// Block scales that need more of a block than its largest magnitude; see inside.cpp.
#pragma once

#include "quant.hpp"

namespace EXTENSOR_ISA {

// The whole array in float32 and under its Hadamard transform, for scales that look inside of its
// blocks. Valid until the next such call of this thread.
const float* plain_values(const QuantPlan& plan, const QuantJob& job);

}  // namespace EXTENSOR_ISA
