//! Turns the table `[retention]` into the retention rules of sessions.

use anyhow::{Result, bail};
use harvest_session::{HistoryLimits, Retention};

use super::keys::{HAS_DEFAULT, RetentionTable};
use crate::printer::Advice;

impl RetentionTable {
    /// Checks the values after `resolve`.
    pub(super) fn rules(self) -> Result<Retention> {
        let rules = Retention {
            archived: self.archived.map(|span| span.0),
            snapshots_per_session: self.snapshots_per_session.expect(HAS_DEFAULT),
            snapshots_bytes: self.snapshots_bytes.map(|size| size.0),
            history: HistoryLimits {
                per_turn: self.history_per_turn.expect(HAS_DEFAULT).0,
                per_session: self.history_per_session.expect(HAS_DEFAULT).0,
            },
        };
        if rules.snapshots_per_session == 0 {
            let message = "retention.snapshots_per_session is 0: no session could resume";
            bail!(Advice::new(message, "set it to 1 or more"));
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
        toml::from_str::<RetentionTable>(text)?.resolve("retention", &env)?.rules()
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
}
