//! `harvest run`: creates a session and follows it until it is done.

use anyhow::{Context, Result};
use harvest_proto::{
    AgentName, Hint as _, ModelRef,
    api::{CreateSession, ModelService, UnusableModel},
};

use super::{
    exec::variables,
    watch::{self, StopWhen},
};
use crate::{
    Invocation, backend::Backend, cli::RunArgs, client::Client, inputs, printer::Advice,
    prompt_input::PromptSource, resolve,
};

pub(crate) async fn run(ctx: &Invocation, args: RunArgs) -> Result<u8> {
    let prompt = PromptSource::one(args.prompt)?;
    let client = Client::find(&ctx.config)?;
    let agent = args.agent.clone().unwrap_or_default();
    check_model_key(&client, &agent, args.model.as_ref()).await?;
    let prompt = prompt.read()?;
    let env = variables(&args.env)?;
    let from = match args.from {
        Some(typed) => {
            Some(resolve::snapshot(&Backend::from_client(client.clone()), &typed).await?)
        }
        None => None,
    };
    let mut repositories =
        inputs::repositories(ctx, &client, &args.repositories, args.all, from.is_some()).await?;
    if let (Some(first), Some(base)) = (repositories.first_mut(), args.base) {
        first.base = Some(base);
    }
    let request = CreateSession {
        repositories,
        prompt: Some(prompt),
        agent: args.agent,
        model: args.model,
        network: args.net,
        env,
        no_questions: args.no_questions,
        from,
        key: args.key,
        ..CreateSession::default()
    };
    let session = client.create(&request).await.context("cannot create a session")?;
    if args.detach {
        ctx.print.result(&session, |session| format!("{}\n", session.id))?;
        ctx.print.hint(format!("`harvest attach {}` follows it", session.id));
        return Ok(0);
    }
    if ctx.print.json {
        ctx.print.item(&session)?;
    }
    ctx.print.note(format!(
        "Created {} on {} (Ctrl-C detaches; the session keeps running)",
        session.id, session.branch
    ));
    let result = watch::follow(ctx, &client, &session.id, 0, StopWhen::Idle).await?;
    Ok(watch::exit_code(ctx, &session.id, result))
}

/// Refuses before a folder is copied and a repository registered. The server checks again.
async fn check_model_key(
    client: &Client,
    agent: &AgentName,
    model: Option<&ModelRef>,
) -> Result<()> {
    let services: Vec<ModelService> = client.all("/v1/model-services").await?;
    UnusableModel::check(&services, agent, model).map_err(|error| {
        let hint = error.hint().unwrap_or_default().into_owned();
        Advice::new(error.to_string(), hint).into()
    })
}
