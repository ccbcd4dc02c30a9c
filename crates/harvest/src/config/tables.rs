//! The tables `[clocks]` and `[limits]` of the configuration file.

use std::time::Duration;

use anyhow::{Result, bail};
use harvest_session::{Limits, timeouts::Timeouts};
use serde::Deserialize;

use super::{Env, parsed};
use crate::printer::Advice;

/// A duration: `90s`, `15m`, `1h 30m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Span(Duration);

impl Span {
    pub(super) fn duration(self) -> Duration {
        self.0
    }
}

#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not a duration; write it as `90s`, `15m` or `24h`")]
pub(crate) struct SpanError(String);

impl std::str::FromStr for Span {
    type Err = SpanError;

    fn from_str(text: &str) -> Result<Self, SpanError> {
        let span = humantime::parse_duration(text).ok().filter(|span| span.as_millis() > 0);
        span.map(Self).ok_or_else(|| SpanError(text.to_owned()))
    }
}

impl TryFrom<String> for Span {
    type Error = SpanError;

    fn try_from(text: String) -> Result<Self, SpanError> {
        text.parse()
    }
}

/// The table `[clocks]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ClocksTable {
    heartbeat: Option<Span>,
    stale: Option<Span>,
    idle_freeze: Option<Span>,
    idle_pause: Option<Span>,
    boot: Option<Span>,
    turn: Option<Span>,
    stop: Option<Span>,
    save: Option<Span>,
    exec: Option<Span>,
    lifetime: Option<Span>,
    build: Option<Span>,
    warm: Option<Span>,
    check: Option<Span>,
    breaker: Option<Span>,
    breaker_failures: Option<usize>,
}

/// Key, default and meaning of each key, for the reference page.
pub(crate) const CLOCKS: [(&str, &str, &str); 15] = [
    ("heartbeat", "`30s`", "Interval of the supervisor's heartbeats"),
    (
        "stale",
        "`90s`",
        "Reconnect to a supervisor that is silent for this long; a sandbox that cannot be reached for \
        this long counts as lost",
    ),
    (
        "idle_freeze",
        "`2m`",
        "The processes of an idle session's sandbox are frozen after this time",
    ),
    ("idle_pause", "`10m`", "An idle session is paused after this time"),
    ("boot", "`30m`", "Time from a sandbox's start until it accepts prompts"),
    ("turn", "`2h`", "A turn that runs longer is stopped"),
    (
        "stop",
        "`1m`",
        "If a stop is not confirmed after this time, the sandbox is killed; its disk is saved",
    ),
    ("save", "`5m`", "The outcome of a save that takes longer is unknown"),
    ("exec", "`30m`", "A command that runs longer is killed, unless it sets another timeout"),
    (
        "lifetime",
        "`24h`",
        "An older sandbox gets no further turn: the session continues in a new one",
    ),
    ("build", "`30m`", "Timeout of a repository build"),
    ("warm", "`5m`", "Timeout of the repository's check during a build"),
    ("check", "`30m`", "Timeout of the repository's check of a pushed commit"),
    ("breaker", "`5m`", "Time during which failed starts are counted"),
    ("breaker_failures", "`3`", "After this many failed starts the session waits for a user"),
];

impl ClocksTable {
    /// Variables override the file, the file overrides the default.
    pub(super) fn merge(self, env: Env) -> Result<Timeouts> {
        let mut clocks = Timeouts::default();
        let mut freeze = clocks.idle_freeze.unwrap_or_default();
        let slots = [
            ("HEARTBEAT", self.heartbeat, &mut clocks.heartbeat),
            ("STALE", self.stale, &mut clocks.stale),
            ("IDLE_FREEZE", self.idle_freeze, &mut freeze),
            ("IDLE_PAUSE", self.idle_pause, &mut clocks.idle_pause),
            ("BOOT", self.boot, &mut clocks.boot),
            ("TURN", self.turn, &mut clocks.turn),
            ("STOP", self.stop, &mut clocks.stop),
            ("SAVE", self.save, &mut clocks.save),
            ("EXEC", self.exec, &mut clocks.exec),
            ("LIFETIME", self.lifetime, &mut clocks.lifetime),
            ("BUILD", self.build, &mut clocks.build),
            ("WARM", self.warm, &mut clocks.warm),
            ("CHECK", self.check, &mut clocks.check),
            ("BREAKER", self.breaker, &mut clocks.breaker),
        ];
        for (name, written, slot) in slots {
            let name = format!("CLOCKS_{name}");
            if let Some(Span(span)) = parsed(&name, env(&format!("HARVEST_{name}")))?.or(written) {
                *slot = span;
            }
        }
        clocks.idle_freeze = Some(freeze);
        if let Some(failures) = number("CLOCKS_BREAKER_FAILURES", env)?.or(self.breaker_failures) {
            clocks.breaker_failures = failures;
        }
        if clocks.stale < clocks.heartbeat * 2 {
            let message =
                "clocks.stale is shorter than two heartbeats: every sandbox would count as lost";
            bail!(Advice::new(message, "make clocks.heartbeat shorter or clocks.stale longer"));
        }
        Ok(clocks)
    }
}

/// The table `[limits]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LimitsTable {
    sandboxes: Option<usize>,
    sandboxes_per_user: Option<usize>,
    checks: Option<usize>,
}

/// Key, default and meaning of each key, for the reference page.
pub(crate) const LIMITS: [(&str, &str, &str); 3] = [
    (
        "sandboxes",
        "4 per core, at most 1 per GiB of memory",
        "Slots: sandboxes running at once, of sessions and standalone ones. Sessions queue for a free \
        slot, standalone sandboxes are refused",
    ),
    ("sandboxes_per_user", "no limit", "Slots of one user"),
    (
        "checks",
        "half the cores",
        "Builds and checks of pushed commits running at once, in addition to the slots",
    ),
];

impl LimitsTable {
    /// Variables override the file, the file overrides the defaults of this machine.
    pub(super) fn merge(self, env: Env) -> Result<Limits> {
        let mut limits = default_limits();
        if let Some(sandboxes) = number("LIMITS_SANDBOXES", env)?.or(self.sandboxes) {
            limits.sandboxes = sandboxes;
        }
        limits.sandboxes_per_user =
            number("LIMITS_SANDBOXES_PER_USER", env)?.or(self.sandboxes_per_user);
        if let Some(checks) = number("LIMITS_CHECKS", env)?.or(self.checks) {
            limits.checks = checks;
        }
        let values = [
            ("sandboxes", Some(limits.sandboxes)),
            ("sandboxes_per_user", limits.sandboxes_per_user),
            ("checks", Some(limits.checks)),
        ];
        if let Some((key, _)) = values.iter().find(|(_, value)| *value == Some(0)) {
            let message = format!("limits.{key} is 0: nothing could run");
            bail!(Advice::new(message, "set it to 1 or more"));
        }
        Ok(limits)
    }
}

fn number(name: &str, env: Env) -> Result<Option<usize>> {
    parsed(name, env(&format!("HARVEST_{name}")))
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
        toml::from_str::<ClocksTable>(text)?.merge(&env)
    }

    fn limits(vars: &[(&str, &str)], text: &str) -> Result<Limits> {
        let env = |name: &str| vars.iter().find(|var| var.0 == name).map(|var| var.1.to_owned());
        toml::from_str::<LimitsTable>(text)?.merge(&env)
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
    fn table_reference_lists_every_key_in_order() {
        fn keys(error: &toml::de::Error) -> Vec<String> {
            error.message().split('`').skip(3).step_by(2).map(str::to_owned).collect()
        }
        let found = keys(&toml::from_str::<ClocksTable>("no_such_key = 1").unwrap_err());
        assert_eq!(found, CLOCKS.map(|key| key.0));
        let found = keys(&toml::from_str::<LimitsTable>("no_such_key = 1").unwrap_err());
        assert_eq!(found, LIMITS.map(|key| key.0));
    }

    #[test]
    fn total_memory_is_read_from_meminfo() {
        assert_eq!(memory_kib("MemFree: 1 kB\nMemTotal:       24000000 kB\n"), Some(24_000_000));
        assert_eq!(memory_kib("nonsense"), None);
    }
}
