#include "dl.h"

#include <dlfcn.h>
#include <link.h>

#include <utility>

namespace monarch {

Library::Library(std::string what, const std::vector<std::string>& candidates, const std::string& advice)
    : what_(std::move(what)) {
  std::string reasons;
  for (const std::string& candidate : candidates) {
    handle_ = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ != nullptr) {
      path_ = candidate;
      link_map* map = nullptr;
      if (dlinfo(handle_, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr && map->l_name[0] != '\0') path_ = map->l_name;
      return;
    }
    const char* reason = dlerror();
    reasons += "\n  " + std::string(reason != nullptr ? reason : candidate.c_str());
  }
  throw LibraryMissing("cannot load " + what_ + ": " + advice + "; tried:" + reasons);
}

void* Library::required(const char* symbol) const {
  void* address = optional(symbol);
  if (address == nullptr) {
    throw LibraryMissing(what_ + " (" + path_ + ") has no function " + symbol + ": it is too old; install a newer one");
  }
  return address;
}

void* Library::optional(const char* symbol) const noexcept { return dlsym(handle_, symbol); }

}  // namespace monarch
