// Our own declarations of what is asked of the GPU runtime about graphs that are being captured; see gpu_api.h.
#pragma once

namespace monarch::capture {

constexpr int kRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED, hipStreamCaptureModeRelaxed

// Both may be null.
struct Table {
  int (*is_capturing)(void* stream, int* status);  // 0: it is not
  int (*exchange_mode)(int* mode);                 // of the calling thread
};

}  // namespace monarch::capture
