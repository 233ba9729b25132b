// Waiting for a ring's next entry: first a short spin, then the doorbell.
//
// Used by the client's end through the bindings. A wake-up through the kernel costs several microseconds on each side,
// more than many answers take, so the consumer looks for a bounded moment before it sleeps. How long is the caller's
// choice.
#pragma once

#include "ring.h"

namespace offloadd {

enum class RingWait { kTimedOut = 0, kPending = 1, kPeerGone = 2 };

// Consumer: returns when an entry is pending, when `liveness` (or -1) is readable or hung up, or after `timeout_ms`.
// Clears the doorbell (an eventfd) that woke it. Throws RingCorruptError, std::system_error.
RingWait ring_wait(Ring& ring, int doorbell, int liveness, double spin_us, int timeout_ms);

}  // namespace offloadd
