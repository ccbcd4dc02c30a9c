//! The body of a pull request: a text above, and a part between two markers that Harvest keeps up
//! to date. Text outside the markers belongs to people once they have changed it. Pure.

use std::fmt::Write as _;

use harvest_proto::{
    AgentName, SessionId,
    api::{CheckOutcome, Evidence, PULL_REQUEST_BEGIN as BEGIN, PULL_REQUEST_END as END},
    bridge::Exit,
};

// What both markers begin with.
const MARKER: &str = "<!-- harvest:";
const BROKEN_MARKER: &str = "<!-- harvest :";

// GitHub takes 65,536 characters.
const MAX_SUMMARY: usize = 40_000;
const MAX_TAIL: usize = 6_000;

/// What Harvest knows about the work.
#[derive(Debug)]
pub(super) struct Facts<'a> {
    pub(super) session: &'a SessionId,
    pub(super) agent: &'a AgentName,
    pub(super) turns: u32,
    pub(super) commit: &'a str,
    /// Of this commit.
    pub(super) evidence: Option<&'a Evidence>,
}

/// A new body: the text of the agent or a user, and Harvest's part.
pub(super) fn compose(summary: &str, facts: &Facts<'_>) -> String {
    let summary: String = without_markers(summary).chars().take(MAX_SUMMARY).collect();
    format!("{}\n\n{}", summary.trim_end(), section(facts))
}

/// The body with Harvest's part replaced; a removed one is added at the end. `summary` replaces the
/// text above.
pub(super) fn update(body: &str, facts: &Facts<'_>, summary: Option<&str>) -> String {
    let (above, below) = split(body);
    let above = match summary {
        Some(summary) => {
            let summary: String = without_markers(summary).chars().take(MAX_SUMMARY).collect();
            format!("{}\n\n", summary.trim_end())
        }
        None if below.is_none() => format!("{}\n\n", above.trim_end()),
        None => above.to_owned(),
    };
    format!("{above}{}{}", section(facts), below.unwrap_or_default())
}

/// Whether two bodies have the same text above Harvest's part. A web form changes line breaks.
pub(super) fn has_same_summary(one: &str, other: &str) -> bool {
    let plain = |body: &str| split(body).0.replace("\r\n", "\n").trim().to_owned();
    plain(one) == plain(other)
}

/// The text above Harvest's part, and that below it; `None` without such a part.
fn split(body: &str) -> (&str, Option<&str>) {
    let Some((above, rest)) = body.split_once(BEGIN) else { return (body, None) };
    let below = rest.split_once(END).map_or("", |(_, below)| below);
    (above, Some(below))
}

/// A text that cannot be taken for Harvest's part.
pub(super) fn without_markers(text: &str) -> String {
    text.replace(MARKER, BROKEN_MARKER)
}

/// Harvest's part, with its markers.
fn section(facts: &Facts<'_>) -> String {
    let Facts { session, agent, turns, commit, evidence } = facts;
    let mut text = format!(
        "{BEGIN}\n- session: `{session}` (`harvest show {session}`)\n- agent: {agent}\n\
         - turns: {turns}\n- commit: `{commit}`\n"
    );
    if let Some(evidence) = evidence {
        text += &check_lines(evidence);
    }
    text + END
}

fn check_lines(evidence: &Evidence) -> String {
    let Evidence { commit, check, command, outcome, exit, millis, tail, .. } = evidence;
    let commit: String = commit.chars().take(7).collect();
    if *outcome == CheckOutcome::NoneDeclared {
        return format!("- check: none, {}\n", code(tail)) + &origin_lines(evidence);
    }
    let check = match check == command {
        true => code(check),
        false => format!("{} ({})", code(check), code(command)),
    };
    let time = match millis {
        0..1000 => format!("{millis} ms"),
        _ => format!("{}.{} s", millis / 1000, millis % 1000 / 100),
    };
    let mut text = format!(
        "- check: {check} {outcome} on `{commit}` ({}) in {time}, run by Harvest in a sandbox \
         that the agent never touched\n",
        describe(exit)
    );
    text += &origin_lines(evidence);
    let skipped = tail.chars().count().saturating_sub(MAX_TAIL);
    let tail: String = without_markers(tail.trim_end()).chars().skip(skipped).collect();
    if !tail.is_empty() {
        let fence = fence(&tail);
        let _ = write!(
            text,
            "\n<details><summary>Last lines of its output</summary>\n\n\
             {fence}text\n{tail}\n{fence}\n\n</details>\n\n"
        );
    }
    text
}

/// Where the check comes from, what the branch changes of it, and the disk that it left.
fn origin_lines(evidence: &Evidence) -> String {
    let Evidence { base, base_commit, changed, changed_count, snapshot_id, .. } = evidence;
    let mut text = String::new();
    if let Some(commit) = base_commit {
        let branch = base.as_ref().map_or("the default branch".to_owned(), |base| code(base));
        let commit: String = commit.chars().take(7).collect();
        let _ = writeln!(text, "- the check is that of {branch} at `{commit}`");
    }
    if *changed_count > 0 {
        let names: Vec<String> = changed.iter().map(|name| code(name)).collect();
        let others = changed_count.saturating_sub(changed.len() as u64);
        let others = if others > 0 { format!(" and {others} more") } else { String::new() };
        let _ =
            writeln!(text, "- **this branch changes `.harvest/`**: {}{others}", names.join(", "));
    }
    if let Some(snapshot) = snapshot_id {
        let _ = writeln!(text, "- disk after the check: `{snapshot}`");
    }
    text
}

/// Text in backticks, whatever it contains.
fn code(text: &str) -> String {
    format!("`{}`", without_markers(text).replace(['`', '\n', '\r'], " "))
}

/// A fence that no line of the text closes.
fn fence(text: &str) -> String {
    let (mut longest, mut run) = (0, 0);
    for c in text.chars() {
        run = if c == '`' { run + 1 } else { 0 };
        longest = longest.max(run);
    }
    "`".repeat(longest.max(2) + 1)
}

pub(super) fn describe(exit: &Exit) -> String {
    match exit {
        Exit::Code(code) => format!("exit code {code}"),
        Exit::Signal(signal) => format!("killed by signal {signal}"),
        Exit::Oom => "out of memory".to_owned(),
        Exit::Timeout => "timed out".to_owned(),
        Exit::Killed => "stopped".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use harvest_proto::Timestamp;
    use proptest::prelude::*;

    use super::*;

    fn evidence(tail: &str) -> Evidence {
        Evidence {
            repository: "acme/shop".parse().unwrap(),
            commit: "4363bc6f00".into(),
            check: ".harvest/check.sh".into(),
            command: ".harvest/check.sh".into(),
            base: None,
            base_commit: None,
            changed: Vec::new(),
            changed_count: 0,
            snapshot_id: None,
            outcome: CheckOutcome::Failed,
            exit: Exit::Code(2),
            millis: 1234,
            tail: tail.into(),
            at: Timestamp::from_millis(0),
        }
    }

    fn with_facts<T>(evidence: Option<&Evidence>, test: impl FnOnce(&Facts<'_>) -> T) -> T {
        let (session, agent) = (SessionId::random(), AgentName::default());
        let commit = "4363bc6f00";
        test(&Facts { session: &session, agent: &agent, turns: 2, commit, evidence })
    }

    #[test]
    fn text_of_people_survives_updates() {
        let body = with_facts(None, |facts| compose("Fixes the login.", facts));
        let edited = format!("Reviewed by Bo.\r\n\r\n{}\r\nCloses #3", body);
        let updated = with_facts(Some(&evidence("boom")), |facts| update(&edited, facts, None));
        assert!(updated.starts_with("Reviewed by Bo.\r\n\r\nFixes the login."), "{updated}");
        assert!(updated.ends_with(&format!("{END}\r\nCloses #3")), "{updated}");
        assert!(updated.contains("`.harvest/check.sh` failed on `4363bc6` (exit code 2) in 1.2 s"));
        assert!(updated.contains("```text\nboom\n```"), "{updated}");
        assert!(!has_same_summary(&body, &edited));
        assert!(has_same_summary(&body, &body.replace('\n', "\r\n")));
    }

    #[test]
    fn removed_part_is_added_at_end() {
        let updated = with_facts(None, |facts| update("By hand\n", facts, None));
        assert!(updated.starts_with("By hand\n\n<!-- harvest:begin -->\n"), "{updated}");
        let replaced = with_facts(None, |facts| update(&updated, facts, Some("Better")));
        assert!(replaced.starts_with("Better\n\n<!-- harvest:begin -->\n"), "{replaced}");
        assert_eq!(replaced.matches(BEGIN).count(), 1);
    }

    proptest! {
        #[test]
        fn nothing_in_texts_ends_or_imitates_the_part(
            summary in "(<!-- harvest:begin -->|<!-- harvest:end -->|[a-z`\n]){0,12}",
            tail in "(<!-- harvest:begin -->|<!-- harvest:end -->|</details>|`{1,5}|[a-z\n]){0,12}",
        ) {
            let evidence = evidence(&tail);
            with_facts(Some(&evidence), |facts| {
                let body = compose(&summary, facts);
                prop_assert_eq!(body.matches(BEGIN).count(), 1);
                prop_assert_eq!(body.matches(END).count(), 1);
                prop_assert!(body.ends_with(END));
                let again = update(&body, facts, None);
                prop_assert_eq!(&again, &body);
                let edited = format!("{body}\nbelow");
                let updated = update(&edited, facts, Some(&summary));
                prop_assert_eq!(split(&updated).1, Some("\nbelow"));
                Ok(())
            })?;
        }
    }
}
