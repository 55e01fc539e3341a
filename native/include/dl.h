// Libraries that are opened when they are needed, never linked.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace monarch {

// A shared library, or a symbol of one, is not on this machine; the text says what to install.
class LibraryMissing : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A library opened by dlopen. It stays loaded for the life of the process: GPU runtimes and communication libraries
// leave threads and exit handlers behind, which would run in unmapped code after a dlclose.
class Library {
 public:
  // Opens the first candidate (a soname or a path) that can be loaded.
  // `what` names the library in errors, `advice` says what to install. Throws LibraryMissing with every reason.
  Library(std::string what, const std::vector<std::string>& candidates, const std::string& advice);

  // The address of a symbol; throws LibraryMissing when the library has none of that name.
  void* required(const char* symbol) const;
  // The address of a symbol, or nullptr.
  void* optional(const char* symbol) const noexcept;

  template <typename Function>
  void require(Function*& entry, const char* symbol) const {
    entry = reinterpret_cast<Function*>(required(symbol));
  }
  template <typename Function>
  void find(Function*& entry, const char* symbol) const noexcept {
    entry = reinterpret_cast<Function*>(optional(symbol));
  }

  // The file that was loaded, as far as the dynamic linker knows.
  const std::string& path() const noexcept { return path_; }

 private:
  std::string what_;
  std::string path_;
  void* handle_ = nullptr;
};

}  // namespace monarch
