//! `harvest events`: a session's events as they are, one JSON object per line, for programs.

use anyhow::{Result, bail};
use futures_util::StreamExt;
use harvest_proto::EventBody;
use serde_json::json;

use crate::{
    Invocation, cli::Events, client::Client, follow::Update, printer::Advice, resolve, whole,
};

pub(crate) async fn run(here: &Invocation, args: &Events) -> Result<u8> {
    check(&args.types)?;
    let client = Client::find(&here.config)?;
    let session = resolve::session(&client, &args.session).await?;
    let mut updates = client.told(&session, args.after, args.follow);
    while let Some(update) = updates.next().await {
        let Update::Event(mut event) = update? else { continue };
        if !is_wanted(&event.body, &args.types) {
            continue;
        }
        if args.full {
            whole::fetch(&client, &session, &mut event.body).await?;
        }
        here.print.item(&event)?;
    }
    Ok(0)
}

fn is_wanted(body: &EventBody, types: &[String]) -> bool {
    let name = serde_json::to_value(body).unwrap_or_default();
    types.is_empty() || types.iter().any(|wanted| name["type"] == wanted.as_str())
}

/// A type that does not exist would print nothing for ever.
fn check(types: &[String]) -> Result<()> {
    for name in types {
        let Err(error) = serde_json::from_value::<EventBody>(json!({ "type": name })) else {
            continue;
        };
        let error = error.to_string();
        // Anything else says that the type is known and has fields.
        if let Some(known) =
            error.strip_prefix(&format!("unknown variant `{name}`, expected one of "))
        {
            bail!(Advice::new(
                format!("there is no event of type `{name}`"),
                format!("there are {known}")
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_that_does_not_exist_is_refused_with_those_that_do() {
        check(&["tool_ended".into(), "compacted".into()]).unwrap();
        let error = check(&["tool_edned".into()]).unwrap_err();
        assert!(crate::printer::hint_of(&error).unwrap().contains("`tool_ended`"), "{error}");
    }

    #[test]
    fn only_the_types_asked_for_are_wanted() {
        let text = EventBody::TextDelta { text: "x".into() };
        assert!(is_wanted(&text, &[]) && is_wanted(&text, &["text_delta".into()]));
        assert!(!is_wanted(&text, &["turn_ended".into()]));
    }
}
