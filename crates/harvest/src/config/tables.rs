//! Turns the tables `[clocks]` and `[limits]` into the timeouts and limits of sessions.

use std::time::Duration;

use anyhow::{Result, bail};
use harvest_session::{Limits, timeouts::Timeouts};
use serde::Deserialize;

use super::keys::{ClocksTable, HAS_DEFAULT, LimitsTable};
use crate::printer::Advice;

/// A duration: `90s`, `15m`, `1h 30m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Span(pub(super) Duration);

impl std::str::FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a duration; write it as `90s`, `15m` or `24h`");
        let span = humantime::parse_duration(text).ok().filter(|span| span.as_millis() > 0);
        span.map(Self).ok_or_else(wrong)
    }
}

impl TryFrom<String> for Span {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

fn duration(span: Option<Span>) -> Duration {
    span.expect(HAS_DEFAULT).0
}

impl ClocksTable {
    /// Checks the values after `resolve`.
    pub(super) fn timeouts(self) -> Result<Timeouts> {
        let clocks = Timeouts {
            heartbeat: duration(self.heartbeat),
            stale: duration(self.stale),
            idle_freeze: self.idle_freeze.map(|span| span.0),
            idle_pause: duration(self.idle_pause),
            boot: duration(self.boot),
            turn: duration(self.turn),
            silence: duration(self.silence),
            stop: duration(self.stop),
            save: duration(self.save),
            exec: duration(self.exec),
            lifetime: duration(self.lifetime),
            build: duration(self.build),
            warm: duration(self.warm),
            schedule_run: Timeouts::default().schedule_run,
            check: duration(self.check),
            breaker: duration(self.breaker),
            breaker_failures: self.breaker_failures.expect(HAS_DEFAULT),
        };
        if clocks.stale < clocks.heartbeat * 2 {
            let message =
                "clocks.stale is shorter than two heartbeats: every sandbox would count as lost";
            bail!(Advice::new(message, "make clocks.heartbeat shorter or clocks.stale longer"));
        }
        Ok(clocks)
    }
}

impl LimitsTable {
    /// The limits of one sandbox.
    pub(super) fn sandbox_limits(&self) -> harvest_engine::Limits {
        let defaults = default_limits();
        let at_once =
            self.sandboxes.unwrap_or(defaults.sandboxes) + self.checks.unwrap_or(defaults.checks);
        let default = harvest_engine::Limits::default();
        harvest_engine::Limits {
            pids: self.processes.unwrap_or_else(|| harvest_engine::processes_per_sandbox(at_once)),
            writable_bytes: self.disk.map_or(default.writable_bytes, |size| Some(size.0)),
            ..default
        }
    }

    /// Checks the values after `resolve`; the defaults are those of this machine.
    pub(super) fn limits(self) -> Result<Limits> {
        let defaults = default_limits();
        let limits = Limits {
            sandboxes: self.sandboxes.unwrap_or(defaults.sandboxes),
            sandboxes_per_user: self.sandboxes_per_user,
            member_sandboxes: self.member_sandboxes.unwrap_or(defaults.member_sandboxes),
            checks: self.checks.unwrap_or(defaults.checks),
        };
        let values = [
            ("sandboxes", Some(limits.sandboxes)),
            ("sandboxes_per_user", limits.sandboxes_per_user),
            ("checks", Some(limits.checks)),
            ("processes", self.processes.map(|count| count as usize)),
        ];
        if let Some((key, _)) = values.iter().find(|(_, value)| *value == Some(0)) {
            let message = format!("limits.{key} is 0: nothing could run");
            bail!(Advice::new(message, "set it to 1 or more"));
        }
        Ok(limits)
    }
}

/// Limits for this machine's cores and memory.
fn default_limits() -> Limits {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let memory = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| memory_kib(&text));
    Limits::for_host(cores, memory.map_or(u64::MAX, |kib| kib.saturating_mul(1024)))
}

fn memory_kib(meminfo: &str) -> Option<u64> {
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    total.trim().strip_suffix("kB")?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clocks(vars: &[(&str, &str)], text: &str) -> Result<Timeouts> {
        let env = |name: &str| vars.iter().find(|var| var.0 == name).map(|var| var.1.to_owned());
        toml::from_str::<ClocksTable>(text)?.resolve("clocks", &env)?.timeouts()
    }

    fn limits(vars: &[(&str, &str)], text: &str) -> Result<Limits> {
        let env = |name: &str| vars.iter().find(|var| var.0 == name).map(|var| var.1.to_owned());
        toml::from_str::<LimitsTable>(text)?.resolve("limits", &env)?.limits()
    }

    #[test]
    fn sandbox_limits_come_from_the_settings() {
        let read = |text| toml::from_str::<LimitsTable>(text).unwrap().sandbox_limits();
        let given = read("processes = 99\ndisk = \"3g\"");
        assert_eq!((given.pids, given.writable_bytes), (99, Some(3 << 30)));
        let pids = read("sandboxes = 1000000").pids;
        assert!(pids <= 4096 && pids == read("sandboxes = 2000000").pids, "{pids}");
        assert_eq!(read("").writable_bytes, Some(10 << 30));
    }

    #[test]
    fn variables_override_file_and_default() {
        assert_eq!(clocks(&[], "").unwrap(), Timeouts::default());
        let file = "idle_pause = \"15m\"\nidle_freeze = \"90s\"";
        let read = clocks(&[("HARVEST_CLOCKS_IDLE_PAUSE", "1h 30m")], file).unwrap();
        assert_eq!(read.idle_pause, Duration::from_secs(5400));
        assert_eq!(read.idle_freeze, Some(Duration::from_secs(90)));
    }

    #[test]
    fn invalid_durations_are_refused_with_examples() {
        for text in ["turn = \"soon\"", "turn = 15", "turn = \"0s\"", "trun = \"1m\""] {
            assert!(clocks(&[], text).is_err(), "{text}");
        }
        let error = clocks(&[("HARVEST_CLOCKS_TURN", "soon")], "").unwrap_err();
        assert!(format!("{error:#}").contains("write it as"), "{error:#}");
        assert!(clocks(&[], "heartbeat = \"1m\"").is_err(), "every sandbox would count as lost");
    }

    #[test]
    fn limits_of_zero_are_refused() {
        assert_eq!(
            limits(&[("HARVEST_LIMITS_SANDBOXES", "2")], "sandboxes = 7").unwrap().sandboxes,
            2
        );
        assert_eq!(limits(&[], "sandboxes_per_user = 3").unwrap().sandboxes_per_user, Some(3));
        assert!(limits(&[], "").unwrap().sandboxes >= 1);
        for text in ["sandboxes = 0", "sandboxes_per_user = 0", "checks = 0", "sandboxes = -1"] {
            assert!(limits(&[], text).is_err(), "{text}");
        }
    }

    #[test]
    fn total_memory_is_read_from_meminfo() {
        assert_eq!(memory_kib("MemFree: 1 kB\nMemTotal:       24000000 kB\n"), Some(24_000_000));
        assert_eq!(memory_kib("nonsense"), None);
    }
}
