// relay: joins the bridges of regions by uplinks that have a rate, a delay and a loss.
//
//   relay QUEUE_MS DELAY_MS LOSS SEED MBIT...      one rate for each region; both ways
//
// Model    Region i has a TAP device region<i>. A frame waits for its region's uplink, then for the uplink of the other
//          region, then DELAY_MS. A queue that would hold a frame for more than QUEUE_MS drops the frame. LOSS is the
//          part of frames that vanish between two regions, drawn at random. The relay learns MAC addresses as a switch
//          does. Nothing is coalesced: the kernel cuts large packets before a TAP device gets them.
// Output   "ready" when the devices exist. On SIGTERM one line of JSON: frames and bytes that left each region, drops,
//          losses.
// Source   the model of Mahimahi's link shell (Netravali et al., USENIX ATC 2015): one queue, one rate, one delay each
//          way.

#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <queue>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using Seconds = double;
constexpr std::size_t kFrameMax = 2048;

volatile std::sig_atomic_t stopped = 0;

Seconds now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Frame {
  std::array<std::uint8_t, kFrameMax> bytes;
  std::size_t length;
};

struct Queue {  // in front of one direction of an uplink
  double bytes_per_second;
  Seconds free_at = 0;

  // When the frame has left, or 0: it does not fit.
  Seconds pass(Seconds at, std::size_t bytes, Seconds longest) {
    const Seconds begins = std::max(at, free_at);
    if (begins - at > longest) return 0;
    return free_at = begins + static_cast<double>(bytes) / bytes_per_second;
  }
};

struct Region {
  int tap;
  Queue up, down;
  std::uint64_t frames = 0, bytes = 0, dropped = 0, lost = 0;
};

struct Event {
  Seconds at;
  std::uint64_t number;  // of two at the same time the first goes first
  Frame* frame;
  int from, to;
  bool is_delivery;
  bool operator<(const Event& other) const { return at != other.at ? at > other.at : number > other.number; }
};

int open_tap(const std::string& name) {
  const int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  ifreq request{};
  request.ifr_flags = IFF_TAP | IFF_NO_PI;
  std::strncpy(request.ifr_name, name.c_str(), IFNAMSIZ - 1);
  if (fd < 0 || ioctl(fd, TUNSETIFF, &request) != 0) {
    std::perror("relay: /dev/net/tun");
    std::exit(1);
  }
  return fd;
}

std::uint64_t mac(const std::uint8_t* bytes) {
  std::uint64_t value = 0;
  std::memcpy(&value, bytes, 6);
  return value;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 7) {
    std::fputs("usage: relay QUEUE_MS DELAY_MS LOSS SEED MBIT MBIT...\n", stderr);
    return 2;
  }
  const Seconds longest = std::atof(argv[1]) / 1e3, delay = std::atof(argv[2]) / 1e3;
  const double loss = std::atof(argv[3]);
  std::mt19937_64 random(std::strtoull(argv[4], nullptr, 10));
  std::bernoulli_distribution is_lost(loss);
  std::vector<Region> regions;
  for (int i = 5; i < argc; ++i) {
    const double rate = std::atof(argv[i]) * 1e6 / 8;
    regions.push_back({open_tap("region" + std::to_string(i - 5)), {rate}, {rate}});
  }
  std::signal(SIGTERM, [](int) { stopped = 1; });
  // It is the network: processes that are measured must not delay it.
  const sched_param priority{1};
  (void)sched_setscheduler(0, SCHED_RR, &priority);
  std::puts("ready");
  std::fflush(stdout);

  std::unordered_map<std::uint64_t, int> region_of;  // by MAC address
  std::priority_queue<Event> events;
  std::vector<Frame*> unused;
  std::uint64_t number = 0;
  const auto take = [&] {
    if (unused.empty()) unused.push_back(new Frame);
    Frame* frame = unused.back();
    unused.pop_back();
    return frame;
  };
  std::vector<pollfd> polled;
  for (const Region& region : regions) polled.push_back({region.tap, POLLIN, 0});

  while (!stopped) {
    timespec wait{1, 0};
    if (!events.empty()) {
      const Seconds left = std::clamp(events.top().at - now(), 0.0, 1.0);
      wait = {static_cast<time_t>(left),
              static_cast<long>((left - static_cast<double>(static_cast<time_t>(left))) * 1e9)};
    }
    (void)ppoll(polled.data(), polled.size(), &wait, nullptr);
    for (int from = 0; from < static_cast<int>(regions.size()); ++from) {
      Region& region = regions[static_cast<std::size_t>(from)];
      for (int i = 0; i < 64; ++i) {
        Frame* frame = take();
        const ssize_t got = read(region.tap, frame->bytes.data(), kFrameMax);
        if (got < 14) {
          unused.push_back(frame);
          break;
        }
        frame->length = static_cast<std::size_t>(got);
        region_of[mac(&frame->bytes[6])] = from;
        const auto known = region_of.find(mac(&frame->bytes[0]));
        if (known != region_of.end() && known->second == from) {
          unused.push_back(frame);
          continue;
        }
        const Seconds left = region.up.pass(now(), frame->length, longest);
        if (left == 0) {
          ++region.dropped;
          unused.push_back(frame);
          continue;
        }
        ++region.frames;
        region.bytes += frame->length;
        for (int to = 0; to < static_cast<int>(regions.size()); ++to) {
          if (to == from || (known != region_of.end() && known->second != to)) continue;
          if (loss > 0 && is_lost(random)) {
            ++region.lost;
            continue;
          }
          Frame* copy = take();
          copy->length = frame->length;
          std::memcpy(copy->bytes.data(), frame->bytes.data(), frame->length);
          events.push({left, number++, copy, from, to, false});
        }
        unused.push_back(frame);
      }
    }
    while (!events.empty() && events.top().at <= now()) {
      Event event = events.top();
      events.pop();
      Region& to = regions[static_cast<std::size_t>(event.to)];
      if (!event.is_delivery) {
        const Seconds left = to.down.pass(event.at, event.frame->length, longest);
        if (left != 0) {
          events.push({left + delay, event.number, event.frame, event.from, event.to, true});
          continue;
        }
        ++regions[static_cast<std::size_t>(event.from)].dropped;
      } else if (write(to.tap, event.frame->bytes.data(), event.frame->length) < 0) {
        ++to.dropped;
      }
      unused.push_back(event.frame);
    }
  }
  std::fputs("[", stdout);
  for (std::size_t i = 0; i < regions.size(); ++i)
    std::printf("%s{\"frames\": %llu, \"bytes\": %llu, \"dropped\": %llu, \"lost\": %llu}", i == 0 ? "" : ", ",
                static_cast<unsigned long long>(regions[i].frames), static_cast<unsigned long long>(regions[i].bytes),
                static_cast<unsigned long long>(regions[i].dropped), static_cast<unsigned long long>(regions[i].lost));
  std::puts("]");
  return 0;
}
