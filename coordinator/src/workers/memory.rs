//! Whether the system has killed processes for want of memory: told by the control group that this process and its workers
//! are in.

use std::path::{Path, PathBuf};

/// Where control groups of version 2 are mounted.
const ROOT: &str = "/sys/fs/cgroup";

/// Processes of this group that were killed because memory ran out, ever. 0 where the system does not say.
pub(super) fn kills() -> u64 {
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let events = std::fs::read_to_string(events_file(&own)).unwrap_or_default();
    counter(&events)
}

/// The group's event counters. Within a container the group may be the root of what can be seen.
fn events_file(own: &str) -> PathBuf {
    let group = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let file = Path::new(ROOT).join(group).join("memory.events");
    if file.exists() { file } else { Path::new(ROOT).join("memory.events") }
}

fn counter(events: &str) -> u64 {
    let value = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
    value.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kills_are_read_from_the_events_of_the_group() {
        assert_eq!(counter("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n"), 2);
        assert_eq!(counter(""), 0);
    }

    #[test]
    fn a_group_that_cannot_be_seen_is_the_root() {
        assert_eq!(events_file("0::/no/such/group\n"), Path::new("/sys/fs/cgroup/memory.events"));
    }
}
