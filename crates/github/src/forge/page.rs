//! A pull request as a small page. Everything on it was written by somebody else, so everything is escaped;
//! the page runs no script and loads nothing.

use std::fmt::Write;

use harvest_proto::{
    api::{Evidence, Pull},
    bridge::Exit,
};

/// What the page's answer says about what it may do.
pub(super) const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}\
    pre{background:#f5f5f5;padding:1rem;overflow:auto;white-space:pre-wrap}code{background:#f5f5f5}dt{font-weight:600}";

/// The page of a pull request.
pub(super) fn render(repository: &str, pull: &Pull, stat: &str) -> String {
    let title = format!("{} · {repository}#{}", pull.title, pull.number);
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{}</title><style>{STYLE}</style></head><body>\n",
        escape(&title)
    );
    let _infallible = write!(
        page,
        "<h1>{}</h1>\n<p>#{} · {} · <code>{}</code> into <code>{}</code></p>\n\
         <dl><dt>Commit</dt><dd><code>{}</code></dd></dl>\n<pre>{}</pre>\n<h2>Changes</h2>\n<pre>{}</pre>\n<h2>Evidence</h2>\n",
        escape(&pull.title),
        pull.number,
        escape(&pull.state),
        escape(&pull.branch),
        escape(&pull.base),
        escape(&pull.commit),
        escape(&pull.body),
        escape(stat),
    );
    match &pull.evidence {
        Some(evidence) => page.push_str(&evidence_part(evidence, &pull.commit)),
        None => page.push_str("<p>No check has been run on this commit.</p>\n"),
    }
    page.push_str("</body></html>\n");
    page
}

fn evidence_part(evidence: &Evidence, commit: &str) -> String {
    let verdict = if evidence.passed { "passed" } else { "failed" };
    let stale = if evidence.commit == commit { "" } else { " (an older commit)" };
    format!(
        "<p>The check <code>{}</code> <strong>{verdict}</strong> on <code>{}</code>{stale}: {}, {} ms, {}.</p>\n<pre>{}</pre>\n",
        escape(&evidence.check),
        escape(&evidence.commit),
        exit_words(&evidence.exit),
        evidence.millis,
        evidence.at,
        escape(&evidence.tail),
    )
}

fn exit_words(exit: &Exit) -> String {
    match exit {
        Exit::Code(code) => format!("exit code {code}"),
        Exit::Signal(signal) => format!("killed by signal {signal}"),
        Exit::Oom => "out of memory".to_owned(),
        Exit::Timeout => "out of time".to_owned(),
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

    #[test]
    fn nothing_written_by_others_becomes_markup() {
        let evil = "<script>alert('1')</script>\"&";
        let evidence = Evidence {
            repository: Some(evil.into()),
            commit: evil.into(),
            check: evil.into(),
            passed: true,
            exit: Exit::Code(0),
            millis: 5,
            tail: evil.into(),
            at: Timestamp::from_millis(0),
        };
        let pull = Pull {
            number: 1,
            url: evil.into(),
            title: evil.into(),
            body: evil.into(),
            state: evil.into(),
            branch: evil.into(),
            base: evil.into(),
            commit: evil.into(),
            evidence: Some(evidence),
        };
        let page = render(evil, &pull, evil);
        assert!(!page.contains("<script") && !page.contains("alert('"));
        assert!(page.contains("&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&quot;&amp;"));
    }
}
