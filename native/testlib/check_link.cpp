// Devices, regions and links on fake_verbs.cpp, for runs under sanitizers: bytes, each outcome, and that all is given
// back.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "rdma.h"

using namespace monarch::rdma;

namespace {

int failures = 0;

void expect(bool fine, const char* what, const std::string& got = {}) {
  if (fine) return;
  ++failures;
  std::fprintf(stderr, "not so: %s (%s)\n", what, got.c_str());
}

void (*set)(int mode, bool up);
long (*held)();

std::uint64_t at(const void* memory) { return reinterpret_cast<std::uint64_t>(memory); }

// Two ends with memory of their own, as an asking process and an owner have.
struct Ends {
  static constexpr std::size_t kBytes = 3'000'001;
  std::shared_ptr<Device> device = std::make_shared<Device>("fake0", 1, 3);
  std::vector<char> here = std::vector<char>(kBytes), there = std::vector<char>(kBytes);
  Region local{device, at(here.data()), kBytes, true, false};
  Region remote{device, at(there.data()), kBytes, true, true};
  Region readable{device, at(there.data()), kBytes, false, true};
  Link link{device, 3, 16};
  std::unique_ptr<Link> owner = std::make_unique<Link>(device, 3, 16);

  Ends() {
    for (std::size_t i = 0; i < kBytes; ++i) there[i] = static_cast<char>(i * 7 + i / 253);
    link.connect(owner->numbers(), device->gid(), device->lid(), device->mtu());
    owner->connect(link.numbers(), device->gid(), device->lid(), device->mtu());
  }
  Copy copy(bool write, std::uint64_t nbytes = kBytes) const {
    return {write, at(here.data()), local.lkey(), at(there.data()), remote.rkey(), nbytes};
  }
  Outcome run(const std::vector<Copy>& copies, double seconds = 60) { return link.transfer(copies, 4096, seconds); }
};

void fails(const char* expected, Ends& ends, const Copy& copy, double seconds = 60) {
  const Outcome outcome = ends.run({ends.copy(false, 100), copy}, seconds);
  expect(outcome.kind == expected, expected, outcome.kind + ": " + outcome.text);
  expect(ends.run({ends.copy(false)}).kind == "device", "a link that has failed is of no further use");
}

void bytes_and_directions(int mode) {
  set(mode, true);
  Ends ends;
  expect(ends.run({ends.copy(false)}).kind.empty(), "a read");
  expect(ends.here == ends.there, "what was read");
  for (char& byte : ends.here) byte = static_cast<char>(~byte);
  std::vector<Copy> copies;
  for (std::uint64_t start = 0; start < Ends::kBytes; start += 9973) {
    const std::uint64_t size = std::min<std::uint64_t>(9973, Ends::kBytes - start);
    copies.push_back(
        {true, at(&ends.here[start]), ends.local.lkey(), at(&ends.there[start]), ends.remote.rkey(), size});
  }
  expect(ends.run(copies).kind.empty(), "many writes");
  expect(ends.here == ends.there, "what was written");
  expect(ends.run({}).kind.empty(), "nothing to do");
}

void outcomes() {
  set(0, true);
  {
    Ends ends;
    Copy wrong = ends.copy(false);
    wrong.rkey ^= 0x5a00;
    fails("access", ends, wrong);
  }
  {
    Ends ends;
    Copy beyond = ends.copy(false);
    beyond.remote += 1;
    fails("access", ends, beyond);
  }
  {
    Ends ends;
    Copy write = ends.copy(true);
    write.rkey = ends.readable.rkey();
    fails("access", ends, write);
  }
  {
    Ends ends;
    Copy wrong = ends.copy(false);
    wrong.lkey ^= 0x5a00;
    fails("local", ends, wrong);
  }
  {
    Ends ends;
    ends.owner.reset();  // its process has ended
    const Outcome outcome = ends.run({ends.copy(false)});
    expect(outcome.kind == "peer", "peer", outcome.kind);
  }
  {
    Ends ends;
    ends.owner.reset();
    set(0, false);
    const Outcome outcome = ends.run({ends.copy(false)});
    expect(outcome.kind == "device" && outcome.text.find("port") != std::string::npos, "port", outcome.text);
    set(0, true);
  }
}

void deadlines() {
  {
    set(1, true);
    Ends ends;
    fails("timeout", ends, ends.copy(false), 0.05);
  }
  {
    set(2, true);  // 733 pieces of a millisecond each: there is a completion at every look
    Ends ends;
    fails("timeout", ends, ends.copy(false), 0.05);
  }
  set(1, true);
  Ends ends;
  Outcome outcome;
  std::thread waiting([&] { outcome = ends.run({ends.copy(false)}, 600); });
  ends.link.cancel();
  waiting.join();
  expect(outcome.kind == "cancelled", "cancelled", outcome.kind);
}

void dmabufs() {
  set(0, true);
  Ends ends;
  const int fd = memfd_create("dmabuf", MFD_CLOEXEC);
  const std::size_t size = 8192;
  if (fd < 0 || ftruncate(fd, size) != 0) std::abort();
  auto* const memory = static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  {
    const Region region(ends.device, fd, 96, at(memory) + 96, 4096, true, false);
    const Copy copy{false, at(memory) + 96, region.lkey(), at(ends.there.data()), ends.remote.rkey(), 4096};
    expect(ends.run({copy}).kind.empty(), "a read into a dmabuf");
    expect(std::equal(memory + 96, memory + 96 + 4096, ends.there.begin()), "what was read into it");
  }
  close(fd);
  try {
    const Region region(ends.device, fd, 0, at(memory), 4096, true, false);
    expect(false, "a closed dmabuf is refused");
  } catch (const VerbsError& error) {
    expect(error.code() == EBADF, "with the reason", error.what());
  }
  munmap(memory, size);
}

}  // namespace

int main() {
  void* fake = dlopen("libibverbs.so.1", RTLD_NOW);
  set = reinterpret_cast<decltype(set)>(dlsym(fake, "fake_verbs_set"));
  held = reinterpret_cast<decltype(held)>(dlsym(fake, "fake_verbs_held"));
  if (set == nullptr || held == nullptr) return 2;
  bytes_and_directions(0);
  bytes_and_directions(2);
  outcomes();
  deadlines();
  dmabufs();
  expect(held() == 0, "all is given back", std::to_string(held()));
  if (failures == 0) std::puts("all well");
  return failures == 0 ? 0 : 1;
}
