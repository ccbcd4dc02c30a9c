//! `harvest pr`: what a session proposes, and what the platform itself saw of it.

use anyhow::Result;
use harvest_proto::api::Pull;

use crate::{
    Invocation,
    cli::Pr,
    client::Client,
    printer::took,
    render::{exit_words, short},
    resolve,
};

pub(crate) async fn run(here: &Invocation, verb: &Pr) -> Result<u8> {
    let Pr::Show(args) = verb;
    let client = Client::find(&here.config)?;
    let id = resolve::session(&client, &args.session).await?;
    let pull = client.pull(&id).await?;
    let repositories = client.session(&id).await?.repositories;
    let pulls: Vec<&Pull> =
        repositories.iter().filter_map(|repository| repository.pull.as_ref()).collect();
    // A program gets the first, as it always did; `show` has one for each repository.
    here.print.result(&pull, |_| pulls.into_iter().map(text).collect::<Vec<_>>().join("\n"))?;
    Ok(0)
}

/// A pull request in lines of `name  value`.
pub(crate) fn text(pull: &Pull) -> String {
    let mut text = format!(
        "pull        #{} {}\nurl         {}\ntitle       {}\nbranch      {} → {}\ncommit      {}\n",
        pull.number, pull.state, pull.url, pull.title, pull.branch, pull.base, pull.commit
    );
    text += &match &pull.evidence {
        None => "evidence    none: nothing was checked by the platform\n".to_owned(),
        Some(evidence) => format!(
            "evidence    {} on {}: {} ({}) in {}\n            seen by the platform, in a sandbox the agent never touched\n",
            evidence.check,
            short(&evidence.commit),
            if evidence.passed { "passed" } else { "failed" },
            exit_words(evidence.exit),
            took(evidence.millis),
        ),
    };
    text + "\n" + pull.body.trim_end() + "\n"
}
