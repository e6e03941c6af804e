{{/* "true" if one router serves all models: (root). */}}
{{- define "diptych.isShared" -}}
{{- if .root.Values.sharedRouter.enabled }}true{{ end }}
{{- end }}

{{/* A model's router merged with `router`, as YAML: (root, model). */}}
{{- define "diptych.router" -}}
{{- $router := mustMergeOverwrite (dict) (mustDeepCopy .root.Values.router) (mustDeepCopy (.model.router | default dict)) }}
{{- include "diptych.dropNulls" $router }}
{{- toYaml $router }}
{{- end }}

{{/* Name of the router that serves a model: (root, model). */}}
{{- define "diptych.routerName" -}}
{{- if include "diptych.isShared" . }}shared{{ else }}{{ .model }}{{ end }}
{{- end }}

{{/*
Routers of the release, as YAML {routers: [{name, for, model, models, spec}]}: one per model, or one for all models.
`model` is the label of a router with one model, `models` lists all names, `for` is used in messages: (root).
*/}}
{{- define "diptych.routers" -}}
{{- $routers := list }}
{{- if include "diptych.isShared" . }}
{{- $names := list }}
{{- range (include "diptych.models" (dict "root" .root) | fromYaml).models }}{{ $names = append $names .name }}{{ end }}
{{- $routers = list (dict "name" "shared" "for" "the shared router" "model" "" "models" $names "spec" (include "diptych.router" (dict "root" .root "model" dict) | fromYaml)) }}
{{- else }}
{{- range (include "diptych.models" (dict "root" .root) | fromYaml).models }}
{{- $spec := include "diptych.router" (dict "root" $.root "model" .) | fromYaml }}
{{- $routers = append $routers (dict "name" .name "for" (printf "router of model %s" .name) "model" .name "models" (list .name) "spec" $spec) }}
{{- end }}
{{- end }}
{{- toYaml (dict "routers" $routers) }}
{{- end }}

{{/* Router of a route, one of `diptych.routers`; only routers of one model need the name: (root, name, for). */}}
{{- define "diptych.routeTo" -}}
{{- $wanted := "shared" }}
{{- if or .name (not (include "diptych.isShared" .)) }}
{{- $model := include "diptych.model" . | fromYaml }}
{{- $wanted = include "diptych.routerName" (dict "root" .root "model" $model.name) }}
{{- end }}
{{- range (include "diptych.routers" (dict "root" .root) | fromYaml).routers }}
{{- if eq .name $wanted }}{{ toYaml . }}{{ end }}
{{- end }}
{{- end }}

{{/* Model name for clients: (model). */}}
{{- define "diptych.servedName" -}}
{{- .model.servedName | default .model.name }}
{{- end }}

{{/* Models file of a shared router. Changes apply without a restart, except those of `diptych.fixedModels`: (root). */}}
{{- define "diptych.modelsFile" -}}
{{- $root := .root }}
{{- range $model := (include "diptych.models" (dict "root" .root) | fromYaml).models }}
{{- $view := include "diptych.routerView" (dict "model" $model) | fromYaml }}
[[model]]
model = {{ include "diptych.modelSetting" (dict "root" $root "model" $view) | toJson }}
name = {{ include "diptych.servedName" (dict "model" $model) | toJson }}
{{- with $model.aliases }}
aliases = {{ toJson . }}
{{- end }}
{{- with $model.fallbacks }}
{{- $names := list }}
{{- range . }}
{{- $other := include "diptych.model" (dict "root" $root "name" . "for" (printf "fallbacks of model %s" $model.name)) | fromYaml }}
{{- $names = append $names (include "diptych.servedName" (dict "model" $other)) }}
{{- end }}
fallbacks = {{ toJson $names }}
{{- end }}
{{- if hasKey $model "hold" }}
hold = {{ $model.hold }}
{{- end }}
{{- if not (include "diptych.pools" (dict "root" $root "role" "prefill" "model" $model.name) | fromYaml).pools }}
prefill = false
{{- end }}
{{- range $name, $field := dict "requestsPerMinute" "requests_per_minute" "tokensPerMinute" "tokens_per_minute" "concurrentRequests" "concurrent_requests" }}
{{- with get ($model.limits | default dict) $name }}
{{ $field }} = {{ int64 . }}
{{- end }}
{{- end }}
{{- with $model.chatTemplate }}
chat_template = {{ toJson . }}
{{- end }}
{{- with $model.toolParser }}
tool_parser = {{ toJson . }}
{{- end }}
{{- with $model.reasoning }}
reasoning = {{ toJson . }}
{{- end }}
{{- with $model.reasoningStart }}
reasoning_start = {{ toJson . }}
{{- end }}
{{- with $model.reasoningEnd }}
reasoning_end = {{ toJson . }}
{{- end }}
{{- if hasKey $model "reasoningInForm" }}
reasoning_in_form = {{ $model.reasoningInForm }}
{{- end }}
{{- with $model.slo }}
{{- with .ttftMs }}
slo_ttft_ms = {{ include "diptych.tomlValue" . }}
{{- end }}
{{- with .tpotMs }}
slo_tpot_ms = {{ include "diptych.tomlValue" . }}
{{- end }}
{{- with .refuse }}
slo_refuse = {{ toJson . }}
{{- end }}
{{- end }}
{{- $plan := include "diptych.planSettings" (dict "root" $root "model" $model.name) | fromYaml }}
{{- range $name := keys $plan | sortAlpha }}
{{ $name }} = {{ include "diptych.tomlValue" (get $plan $name) }}
{{- end }}
{{- end }}
{{- range $split := .root.Values.sharedRouter.splits }}
[[split]]
name = {{ toJson $split.name }}
{{- $weights := list }}
{{- range $name, $weight := $split.weights }}
{{- $model := include "diptych.model" (dict "root" $root "name" $name "for" (printf "split %s" $split.name)) | fromYaml }}
{{- $weights = append $weights (printf "%s = %s" (include "diptych.servedName" (dict "model" $model) | toJson) (include "diptych.tomlValue" $weight)) }}
{{- end }}
weights = { {{ join ", " $weights }} }
{{- end }}
{{- end }}

{{/* LoRA adapters of a router's models, which routers reload at run time; "" if no model has the key: (root, models). */}}
{{- define "diptych.adaptersFile" -}}
{{- range $name := .models }}
{{- $model := include "diptych.model" (dict "root" $.root "name" $name "for" "adapters") | fromYaml }}
{{- if hasKey $model "adapters" }}
# adapters of {{ $name }}
{{- range $adapter, $entry := $model.adapters }}
{{- if $entry }}
[[adapter]]
name = {{ toJson $adapter }}
path = {{ toJson $entry.path }}
model = {{ include "diptych.servedName" (dict "model" $model) | toJson }}
{{- with $entry.revision }}
revision = {{ toJson . }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Model settings that a router reads only at startup: (root). */}}
{{- define "diptych.fixedModels" -}}
{{- $fixed := list }}
{{- range (include "diptych.models" (dict "root" .root) | fromYaml).models }}
{{- $view := include "diptych.routerView" (dict "model" .) | fromYaml }}
{{- $parts := list (include "diptych.modelSetting" (dict "root" $.root "model" $view)) (include "diptych.servedName" (dict "model" .)) .toolParser .reasoning .slo (len (include "diptych.pools" (dict "root" $.root "role" "prefill" "model" .name) | fromYaml).pools | eq 0) }}
{{- /* Only if set: otherwise a chart upgrade would restart routers without these settings. */}}
{{- with .chatTemplate }}{{ $parts = append $parts . }}{{ end }}
{{- with pick . "reasoningStart" "reasoningEnd" "reasoningInForm" }}{{ $parts = append $parts . }}{{ end }}
{{- with include "diptych.planSettings" (dict "root" $.root "model" .name) | fromYaml }}{{ $parts = append $parts . }}{{ end }}
{{- $fixed = append $fixed $parts }}
{{- end }}
{{- toJson $fixed }}
{{- end }}

{{/* Relabelling of series by model, from the metric: a shared router's pods have no model label: (root). */}}
{{- define "diptych.modelRelabelings" -}}
{{- range (include "diptych.models" (dict "root" .root) | fromYaml).models }}
- {sourceLabels: [model_name], regex: {{ include "diptych.servedName" (dict "model" .) | regexQuoteMeta | toJson }}, targetLabel: diptych_model, replacement: {{ .name | quote }}}
{{- end }}
{{- end }}

{{/* Refuses values that do not match sharedRouter.enabled: (root). */}}
{{- define "diptych.checkShared" -}}
{{- $root := .root }}
{{- if include "diptych.isShared" . }}
{{- $names := list }}
{{- $ids := list }}
{{- range $model := (include "diptych.models" (dict "root" .root) | fromYaml).models }}
{{- if $model.router }}{{ fail (printf "model %s: router configures the model's own router; with sharedRouter.enabled, set the values of `router`" $model.name) }}{{ end }}
{{- $id := include "diptych.modelId" (dict "root" $root "model" $model) }}
{{- $view := include "diptych.routerView" (dict "model" $model) | fromYaml }}
{{- $own := include "diptych.modelId" (dict "root" $root "model" $view) }}
{{- if ne $own $id }}
{{- fail (printf "model %s: its tokenizer is named %s and its source %s; a shared router identifies workers by this name, so both ids, or the last folders of both paths, must be equal" $model.name $own $id) }}
{{- end }}
{{- if has $id $ids }}{{ fail (printf "model %s: another model is also named %s, by its id or folder, and a shared router could not distinguish their workers" $model.name $id) }}{{ end }}
{{- $ids = append $ids $id }}
{{- $served := include "diptych.servedName" (dict "model" $model) }}
{{- if not (regexMatch "^[!-~]{1,256}$" $served) }}{{ fail (printf "model %s: servedName %q needs up to 256 printable ASCII characters without spaces" $model.name $served) }}{{ end }}
{{- range $name := prepend ($model.aliases | default list) $served }}
{{- if has $name $names }}{{ fail (printf "model %s: the name %s is used twice" $model.name $name) }}{{ end }}
{{- $names = append $names $name }}
{{- end }}
{{- end }}
{{- range $split := .root.Values.sharedRouter.splits }}
{{- if has $split.name $names }}{{ fail (printf "split %s: the name is used twice" $split.name) }}{{ end }}
{{- $names = append $names $split.name }}
{{- $sum := 0.0 }}
{{- range $_, $weight := $split.weights }}{{ $sum = addf $sum $weight }}{{ end }}
{{- if not (gt $sum 0.0) }}{{ fail (printf "split %s: at least one of weights must be above 0" $split.name) }}{{ end }}
{{- end }}
{{- else }}
{{- range $model := (include "diptych.models" (dict "root" .root) | fromYaml).models }}
{{- range $key := list "aliases" "fallbacks" "hold" "limits" "chatTemplate" "toolParser" "reasoning" "reasoningStart" "reasoningEnd" "reasoningInForm" }}
{{- if hasKey $model $key }}{{ fail (printf "model %s: %s needs sharedRouter.enabled, one router for all models" $model.name $key) }}{{ end }}
{{- end }}
{{- end }}
{{- if .root.Values.sharedRouter.splits }}{{ fail "sharedRouter.splits needs sharedRouter.enabled" }}{{ end }}
{{- end }}
{{- end }}
