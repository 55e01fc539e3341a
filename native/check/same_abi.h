// Compares a declaration of ours with a vendor's: as many arguments, each of the same size and passed the same way.
#pragma once

#include <type_traits>

namespace monarch::check {

template <typename Ours, typename Theirs>
constexpr bool same_argument =
    sizeof(Ours) == sizeof(Theirs) && std::is_class<Ours>::value == std::is_class<Theirs>::value &&
    std::is_trivially_copyable<Theirs>::value;

template <typename Ours, typename Theirs>
struct SameAbi : std::false_type {};
template <typename R1, typename... Ours, typename R2, typename... Theirs>
struct SameAbi<R1 (*)(Ours...), R2 (*)(Theirs...)> {
  static constexpr bool compare() {
    if constexpr (sizeof...(Ours) == sizeof...(Theirs)) {
      return same_argument<R1, R2> && (same_argument<Ours, Theirs> && ...);
    } else {
      return false;
    }
  }
  static constexpr bool value = compare();
};

}  // namespace monarch::check
