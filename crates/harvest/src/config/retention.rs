//! The table `[retention]` of the configuration file.

use anyhow::{Result, bail};
use harvest_session::Retention;
use serde::Deserialize;

use super::{Env, parsed, tables::Span};
use crate::{cli::units::Size, printer::Advice};

/// The table `[retention]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RetentionTable {
    archived: Option<Span>,
    snapshots_per_session: Option<usize>,
    snapshots_bytes: Option<String>,
}

/// Key, default and meaning of each key, for the reference page.
pub(crate) const RETENTION: [(&str, &str, &str); 3] = [
    (
        "archived",
        "never",
        "Archived sessions are removed after this time, such as `30d`, unless one of their snapshots is pinned",
    ),
    (
        "snapshots_per_session",
        "`100`",
        "Snapshots kept per open session; the oldest are removed first",
    ),
    (
        "snapshots_bytes",
        "no limit",
        "Total size of all sessions' snapshots, such as `50g`; the oldest are removed first",
    ),
];

impl RetentionTable {
    /// Variables override the file, the file overrides the default.
    pub(super) fn merge(self, env: Env) -> Result<Retention> {
        let mut rules = Retention::default();
        let var = |name: &str| env(&format!("HARVEST_RETENTION_{name}"));
        let archived = parsed::<Span>("RETENTION_ARCHIVED", var("ARCHIVED"))?.or(self.archived);
        rules.archived = archived.map(Span::duration);
        let count = parsed("RETENTION_SNAPSHOTS_PER_SESSION", var("SNAPSHOTS_PER_SESSION"))?;
        if let Some(count) = count.or(self.snapshots_per_session) {
            rules.snapshots_per_session = count;
        }
        if rules.snapshots_per_session == 0 {
            let message = "retention.snapshots_per_session is 0: no session could resume";
            bail!(Advice::new(message, "set it to 1 or more"));
        }
        if let Some(text) = var("SNAPSHOTS_BYTES").or(self.snapshots_bytes) {
            let size: Result<Size, String> = text.parse();
            let hint = "in retention.snapshots_bytes, or HARVEST_RETENTION_SNAPSHOTS_BYTES";
            rules.snapshots_bytes = Some(size.map_err(|message| Advice::new(message, hint))?.0);
        }
        Ok(rules)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn rules(vars: &[(&str, &str)], text: &str) -> Result<Retention> {
        let env = |name: &str| vars.iter().find(|var| var.0 == name).map(|var| var.1.to_owned());
        toml::from_str::<RetentionTable>(text)?.merge(&env)
    }

    #[test]
    fn variables_override_file_and_default() {
        assert_eq!(rules(&[], "").unwrap(), Retention::default());
        let file = "archived = \"30d\"\nsnapshots_per_session = 7\nsnapshots_bytes = \"50g\"";
        let read = rules(&[("HARVEST_RETENTION_SNAPSHOTS_PER_SESSION", "3")], file).unwrap();
        assert_eq!(read.archived, Some(Duration::from_secs(30 * 24 * 60 * 60)));
        assert_eq!((read.snapshots_per_session, read.snapshots_bytes), (3, Some(50 << 30)));
        for wrong in [
            "archived = \"soon\"",
            "snapshots_per_session = 0",
            "snapshots_bytes = \"much\"",
            "x = 1",
        ] {
            assert!(rules(&[], wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn retention_reference_lists_every_key_in_order() {
        let error = toml::from_str::<RetentionTable>("no_such_key = 1").unwrap_err();
        let keys: Vec<&str> = error.message().split('`').skip(3).step_by(2).collect();
        assert_eq!(keys, RETENTION.map(|key| key.0));
    }
}
