// Packed weights back to float32, as embeddings need them. See pack.cpp.
#pragma once

#include "abi.h"

namespace samovar {

// Row `row` of the matrix, float32 [cols]. The same bits as dequantizing the source.
void unpack_row(const SamovarMatrix& matrix, int row, float* values);

}  // namespace samovar
