//! `harvest token`: who may ask the server, and as whom.

use anyhow::{Context, Result};
use harvest_proto::{
    api::{self, Role},
    bridge::Author,
};
use serde_json::json;

use crate::{
    Invocation,
    cli::{CreateToken, Token},
    client::Client,
    printer::table,
};

pub(crate) async fn run(here: &Invocation, verb: Token) -> Result<u8> {
    let client = Client::find(&here.config)?;
    match verb {
        Token::Create(args) => create(here, &client, args).await?,
        Token::Ls => {
            let tokens = client.tokens().await?;
            here.print.result(&tokens, |tokens| listed(tokens))?;
            if tokens.iter().all(|token| token.role == Role::Member) {
                let me = client.me().await?;
                here.print.note(format!("Only those of {}; admins see all", me.user.email));
            }
        }
        Token::Rm { names } => {
            for name in &names {
                client.token_delete(name).await.with_context(|| format!("cannot revoke {name}"))?;
                here.print.note(format!("Revoked {name}"));
            }
            here.print.result(&json!({ "revoked": names }), |_| String::new())?;
        }
    }
    Ok(0)
}

async fn create(here: &Invocation, client: &Client, args: CreateToken) -> Result<()> {
    let user = args.user_name.zip(args.email).map(|(name, email)| Author { name, email });
    let role = args.role.map(|role| if role == "admin" { Role::Admin } else { Role::Member });
    let body = api::CreateToken { name: args.name, user, role };
    let made =
        client.token_create(&body).await.with_context(|| format!("cannot make {}", body.name))?;
    here.print.result(&made, |made| format!("{}\n", made.value))?;
    let token = &made.token;
    here.print.note(format!(
        "Made {} for {}, {}; it is shown this once",
        token.name,
        token.user.email,
        token.role.as_str()
    ));
    here.print.hint(format!("they set HARVEST_URL={} and HARVEST_TOKEN to it", client.url()));
    Ok(())
}

fn listed(tokens: &[api::Token]) -> String {
    let row = |token: &api::Token| {
        let used = token.last_used.map_or_else(|| "never".to_owned(), |at| at.to_string());
        let user = format!("{} <{}>", token.user.name, token.user.email);
        vec![token.name.clone(), token.role.as_str().to_owned(), used, user]
    };
    table(&["NAME", "ROLE", "LAST USED", "USER"], &tokens.iter().map(row).collect::<Vec<_>>())
}
