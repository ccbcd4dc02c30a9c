//! The command line of the bench.

use std::{path::PathBuf, time::Duration};

use anyhow::{Context, Result, bail};

pub(crate) const USAGE: &str = "\
usage: harvest-bench [--rounds N] [--gap-millis N] [--quick] [--only WORD]… [--no-peers]
                     [--no-disks] [--folder DIR] [--json FILE]
--rounds N      rounds of the start and exec rows (50)
--gap-millis N  idle time before every sample (200): shorter gaps hide what a first start costs
--quick         three rounds, small trees: shows that the bench works, measures nothing
--only WORD     only rows whose name contains this word; `agent`, `disk`, `gateway`,
                `growth`, `large`, `memory`, `pool`, `session`, `store` and `writes` select groups
--folder DIR    where to put trees and sandboxes (default: a new temporary folder)
--json FILE     also write the report as JSON";

#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) help: bool,
    /// Whether this process already runs in its own mount namespace.
    pub(crate) in_mount_namespace: bool,
    pub(crate) rounds: usize,
    pub(crate) gap: Duration,
    pub(crate) quick: bool,
    pub(crate) peers: bool,
    pub(crate) disks: bool,
    pub(crate) folder: PathBuf,
    pub(crate) json: Option<PathBuf>,
    only: Vec<String>,
}

impl Options {
    /// Parses the arguments, without the program's name.
    pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self> {
        let mut options = Self {
            help: false,
            in_mount_namespace: false,
            rounds: 50,
            gap: Duration::from_millis(200),
            quick: false,
            peers: true,
            disks: true,
            folder: std::env::temp_dir().join(format!("harvest-bench-{}", std::process::id())),
            json: None,
            only: Vec::new(),
        };
        while let Some(word) = arguments.next() {
            let mut value = || arguments.next().with_context(|| format!("{word} needs a value"));
            match word.as_str() {
                "--help" | "-h" => options.help = true,
                "--in-mount-namespace" => options.in_mount_namespace = true,
                "--rounds" => {
                    options.rounds = value()?.parse().context("--rounds needs a number")?
                }
                "--gap-millis" => {
                    options.gap = Duration::from_millis(
                        value()?.parse().context("--gap-millis needs a number")?,
                    );
                }
                "--quick" => (options.quick, options.rounds) = (true, 3),
                "--no-peers" => options.peers = false,
                "--no-disks" => options.disks = false,
                "--only" => options.only.push(value()?),
                "--folder" => options.folder = value()?.into(),
                "--json" => options.json = Some(value()?.into()),
                other => bail!("unknown option {other}\n{USAGE}"),
            }
        }
        if options.rounds == 0 {
            bail!("--rounds must be at least 1");
        }
        Ok(options)
    }

    /// Whether to measure the row of this name.
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|word| name.contains(word.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(words: &[&str]) -> Result<Options> {
        Options::parse(words.iter().map(|word| (*word).to_owned()))
    }

    #[test]
    fn only_selects_rows_by_word() {
        assert!(parsed(&[]).unwrap().wants("crun"));
        let some = parsed(&["--only", "cold", "--only", "bubble"]).unwrap();
        assert!(some.wants("harvest cold") && some.wants("bubblewrap") && !some.wants("crun"));
    }

    #[test]
    fn invalid_options_are_refused() {
        for words in [&["--rouds"][..], &["--rounds"], &["--rounds", "0"], &["--rounds", "x"]] {
            assert!(parsed(words).is_err(), "{words:?}");
        }
    }
}
