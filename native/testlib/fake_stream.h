// What a raw stream handle of fake_device points to, for libraries that enqueue on it.
#pragma once

#include <functional>

// Jobs run one after the other, on a thread of the stream's own.
class FakeStream {
 public:
  virtual void run(std::function<void()> job) = 0;

 protected:
  ~FakeStream() = default;
};
