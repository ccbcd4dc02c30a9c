//! The tables of the configuration file: `[clocks]` and `[limits]`.

use std::time::Duration;

use anyhow::{Result, bail};
use harvest_session::{Limits, clocks::Clocks};
use serde::Deserialize;

use super::{Env, parsed};
use crate::printer::Advice;

/// A time as people write it: `90s`, `15m`, `1h 30m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Span(Duration);

impl Span {
    /// As everything but a text takes it.
    pub(super) fn duration(self) -> Duration {
        self.0
    }
}

/// Why a text is no time.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not a time; write it as `90s`, `15m` or `24h`")]
pub(crate) struct NoSpan(String);

impl std::str::FromStr for Span {
    type Err = NoSpan;

    fn from_str(text: &str) -> Result<Self, NoSpan> {
        let span = humantime::parse_duration(text).ok().filter(|span| span.as_millis() > 0);
        span.map(Self).ok_or_else(|| NoSpan(text.to_owned()))
    }
}

impl TryFrom<String> for Span {
    type Error = NoSpan;

    fn try_from(text: String) -> Result<Self, NoSpan> {
        text.parse()
    }
}

/// `[clocks]` as written.
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

/// Key, default and meaning of each clock, for the reference page.
pub(crate) const CLOCKS: [(&str, &str, &str); 15] = [
    ("heartbeat", "`30s`", "How often a supervisor says that it is there"),
    (
        "stale",
        "`90s`",
        "A supervisor silent for this long is dialled anew; one that cannot be reached for this long is taken for lost",
    ),
    ("idle_freeze", "`2m`", "What runs in an idle session's sandbox stands still after this"),
    ("idle_pause", "`10m`", "An idle session is paused after this"),
    ("boot", "`30m`", "From a sandbox's start until it takes prompts"),
    ("turn", "`2h`", "A turn that runs longer is stopped"),
    ("stop", "`1m`", "A stop that is not confirmed after this kills the sandbox; its disk is kept"),
    ("save", "`5m`", "A save that takes longer has an unknown outcome"),
    ("exec", "`30m`", "A command that runs longer is killed, unless it asks for another limit"),
    (
        "lifetime",
        "`24h`",
        "A sandbox that is older gets no further turn: the session goes on in a new one",
    ),
    ("build", "`30m`", "A repository build"),
    ("warm", "`5m`", "The repository's check while it is built"),
    ("check", "`30m`", "The repository's check on a pushed commit"),
    ("breaker", "`5m`", "Failed starts count for this long"),
    ("breaker_failures", "`3`", "After so many failed starts the session waits for a person"),
];

impl ClocksTable {
    /// The clocks that hold: variable before file before default.
    pub(super) fn merge(self, env: Env) -> Result<Clocks> {
        let mut clocks = Clocks::default();
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
                "clocks.stale is shorter than two heartbeats: every sandbox would look lost";
            bail!(Advice::new(message, "make clocks.heartbeat shorter or clocks.stale longer"));
        }
        Ok(clocks)
    }
}

/// `[limits]` as written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LimitsTable {
    sandboxes: Option<usize>,
    sandboxes_per_user: Option<usize>,
    checks: Option<usize>,
}

/// Key, default and meaning of each limit, for the reference page.
pub(crate) const LIMITS: [(&str, &str, &str); 3] = [
    (
        "sandboxes",
        "4 per core, but 1 per GiB of memory",
        "So many sandboxes run at once, sessions' and those without one; sessions wait in line for a place, others are refused",
    ),
    ("sandboxes_per_user", "no limit", "The same for the sandboxes of one user"),
    (
        "checks",
        "half the cores",
        "So many builds and checks of pushed commits run at once, apart from sessions",
    ),
];

impl LimitsTable {
    /// The limits that hold: variable before file before what this machine can bear.
    pub(super) fn merge(self, env: Env) -> Result<Limits> {
        let mut limits = ours();
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
            let message = format!("limits.{key} is 0: nothing would ever run");
            bail!(Advice::new(message, "make it at least 1"));
        }
        Ok(limits)
    }
}

fn number(name: &str, env: Env) -> Result<Option<usize>> {
    parsed(name, env(&format!("HARVEST_{name}")))
}

/// What this machine can bear.
fn ours() -> Limits {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let memory = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| memory_kib(&text));
    Limits::of_machine(cores, memory.map_or(u64::MAX, |kib| kib.saturating_mul(1024)))
}

fn memory_kib(meminfo: &str) -> Option<u64> {
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    total.trim().strip_suffix("kB")?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clocks(vars: &[(&str, &str)], text: &str) -> Result<Clocks> {
        let env = |name: &str| vars.iter().find(|var| var.0 == name).map(|var| var.1.to_owned());
        toml::from_str::<ClocksTable>(text)?.merge(&env)
    }

    fn limits(vars: &[(&str, &str)], text: &str) -> Result<Limits> {
        let env = |name: &str| vars.iter().find(|var| var.0 == name).map(|var| var.1.to_owned());
        toml::from_str::<LimitsTable>(text)?.merge(&env)
    }

    #[test]
    fn a_clock_is_read_from_variable_before_file_before_default() {
        assert_eq!(clocks(&[], "").unwrap(), Clocks::default());
        let file = "idle_pause = \"15m\"\nidle_freeze = \"90s\"";
        let read = clocks(&[("HARVEST_CLOCKS_IDLE_PAUSE", "1h 30m")], file).unwrap();
        assert_eq!(read.idle_pause, Duration::from_secs(5400));
        assert_eq!(read.idle_freeze, Some(Duration::from_secs(90)));
    }

    #[test]
    fn what_is_no_time_is_refused_in_words() {
        for text in ["turn = \"soon\"", "turn = 15", "turn = \"0s\"", "trun = \"1m\""] {
            assert!(clocks(&[], text).is_err(), "{text}");
        }
        let error = clocks(&[("HARVEST_CLOCKS_TURN", "soon")], "").unwrap_err();
        assert!(format!("{error:#}").contains("write it as"), "{error:#}");
        assert!(clocks(&[], "heartbeat = \"1m\"").is_err(), "every sandbox would look lost");
    }

    #[test]
    fn a_limit_of_nothing_is_refused() {
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
    fn the_reference_has_every_key_of_the_tables_in_its_order() {
        fn keys(error: &toml::de::Error) -> Vec<String> {
            error.message().split('`').skip(3).step_by(2).map(str::to_owned).collect()
        }
        let found = keys(&toml::from_str::<ClocksTable>("no_such_key = 1").unwrap_err());
        assert_eq!(found, CLOCKS.map(|key| key.0));
        let found = keys(&toml::from_str::<LimitsTable>("no_such_key = 1").unwrap_err());
        assert_eq!(found, LIMITS.map(|key| key.0));
    }

    #[test]
    fn the_machines_memory_is_read() {
        assert_eq!(memory_kib("MemFree: 1 kB\nMemTotal:       24000000 kB\n"), Some(24_000_000));
        assert_eq!(memory_kib("nonsense"), None);
    }
}
