//! The HTML page of a pull request. All its content is untrusted, so all of it is escaped; the page
//! runs no script and loads nothing.

use std::fmt::Write;

use harvest_proto::{
    api::{CheckOutcome, Evidence, PullRequest},
    bridge::Exit,
};

pub(super) const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}\
    pre{background:#f5f5f5;padding:1rem;overflow:auto;white-space:pre-wrap}code{background:#f5f5f5}dt{font-weight:600}";

pub(super) fn render(repository: &str, pull_request: &PullRequest, stat: &str) -> String {
    let title = format!("{} · {repository}#{}", pull_request.title, pull_request.number);
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{}</title><style>{STYLE}</style></head><body>\n",
        escape(&title)
    );
    let _infallible = write!(
        page,
        "<h1>{}</h1>\n<p>#{} · {} · <code>{}</code> into <code>{}</code></p>\n\
         <dl><dt>Commit</dt><dd><code>{}</code></dd></dl>\n<pre>{}</pre>\n<h2>Changes</h2>\n<pre>{}</pre>\n<h2>Evidence</h2>\n",
        escape(&pull_request.title),
        pull_request.number,
        pull_request.state,
        escape(&pull_request.branch),
        escape(&pull_request.base),
        escape(&pull_request.commit),
        escape(&pull_request.body),
        escape(stat),
    );
    match &pull_request.evidence {
        Some(evidence) => page.push_str(&render_evidence(evidence, &pull_request.commit)),
        None => page.push_str("<p>No check has been run on this commit.</p>\n"),
    }
    page.push_str("</body></html>\n");
    page
}

fn render_evidence(evidence: &Evidence, commit: &str) -> String {
    let verdict = match evidence.outcome {
        CheckOutcome::Passed => "passed",
        CheckOutcome::Failed => "failed",
        CheckOutcome::NoneDeclared => "does not exist",
    };
    let stale = if evidence.commit == commit { "" } else { " (older commit)" };
    format!(
        "<p>The check <code>{}</code> <strong>{verdict}</strong> on <code>{}</code>{stale}: {}, {} ms, {}.</p>\n<pre>{}</pre>\n",
        escape(&evidence.check),
        escape(&evidence.commit),
        describe_exit(&evidence.exit),
        evidence.millis,
        evidence.at,
        escape(&evidence.tail),
    )
}

fn describe_exit(exit: &Exit) -> String {
    match exit {
        Exit::Code(code) => format!("exit code {code}"),
        Exit::Signal(signal) => format!("killed by signal {signal}"),
        Exit::Oom => "out of memory".to_owned(),
        Exit::Timeout => "timed out".to_owned(),
        Exit::Killed => "stopped".to_owned(),
    }
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use harvest_proto::Timestamp;

    use super::*;
    use harvest_proto::api::PullRequestState;

    #[test]
    fn untrusted_content_is_escaped() {
        let evil = "<script>alert('1')</script>\"&";
        let evidence = Evidence {
            repository: "local/app".parse().unwrap(),
            commit: evil.into(),
            check: evil.into(),
            command: evil.into(),
            base: None,
            base_commit: None,
            changed: Vec::new(),
            changed_count: 0,
            snapshot_id: None,
            outcome: CheckOutcome::Passed,
            exit: Exit::Code(0),
            millis: 5,
            tail: evil.into(),
            at: Timestamp::from_millis(0),
        };
        let pull_request = PullRequest {
            number: 1,
            url: evil.into(),
            title: evil.into(),
            body: evil.into(),
            state: PullRequestState::Open,
            draft: false,
            branch: "harvest/a".parse().unwrap(),
            base: "main".parse().unwrap(),
            commit: evil.into(),
            evidence: Some(evidence),
        };
        let page = render(evil, &pull_request, evil);
        assert!(!page.contains("<script") && !page.contains("alert('"));
        assert!(page.contains("&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&quot;&amp;"));
    }
}
