{{/* Refuses a list, as in earlier charts, and prints the equivalent map: (list, at). */}}
{{- define "diptych.refuseList" -}}
{{- $map := dict }}
{{- range .list }}
{{- if kindIs "map" . }}{{ $_ := set $map (toString .name) (omit . "name") }}{{ end }}
{{- end }}
{{- fail (printf "%s is a list; it is a map keyed by name, so that --set %s.NAME... and overlays can change one entry (docs/guides/kubernetes.md, Models and pools). Write instead:\n%s:\n%s\n" .at .at (last (splitList "." .at)) (toYaml $map | indent 2)) }}
{{- end }}

{{/* Type of a model's source, derived from its keys: (source). */}}
{{- define "diptych.sourceType" -}}
{{- .source.type | default (ternary "pvc" (ternary "image" (ternary "hub" "path" (hasKey .source "id")) (hasKey .source "reference")) (hasKey .source "claimName")) }}
{{- end }}

{{/*
Models by name, as YAML {models: [{name, source: {type, ...}, ...}]}: (root). Null entries are omitted. The result is cached at
the root, because many templates use it.
*/}}
{{- define "diptych.models" -}}
{{- if not (hasKey .root "diptychModels") }}
{{- $_ := set .root "diptychModels" (include "diptych.makeModels" .) }}
{{- end }}
{{- .root.diptychModels }}
{{- end }}

{{- define "diptych.makeModels" -}}
{{- if kindIs "slice" .root.Values.models }}
{{- include "diptych.refuseList" (dict "list" .root.Values.models "at" "models") }}
{{- end }}
{{- $default := .root.Values.sharedRouter.defaultModel }}
{{- if and $default (not (get .root.Values.models $default)) }}
{{- fail (printf "sharedRouter.defaultModel is %s, but models has %s" $default (keys .root.Values.models | sortAlpha | join ", ")) }}
{{- end }}
{{- $models := list }}
{{- range $name, $model := .root.Values.models }}
{{- if $model }}
{{- $source := merge (dict "type" (include "diptych.sourceType" (dict "source" $model.source))) $model.source }}
{{- include "diptych.checkCache" (dict "source" $source "name" $name) }}
{{- range $key := list "source" "tokenizer" }}
{{- $path := (get $model $key | default dict).path | default "" }}
{{- if has ".." (splitList "/" $path) }}
{{- fail (printf "models.%s.%s.path %s leaves its folder: use a path without .." $name $key $path) }}
{{- end }}
{{- end }}
{{- if $source.cacheVolume }}{{ $_ := set $source "cacheClaim" (include "diptych.objectName" (dict "root" $.root "role" "model" "name" $name)) }}{{ end }}
{{- $entry := merge (dict "name" (toString $name) "source" $source) $model }}
{{- with $model.tokenizer }}
{{- $_ := set $entry "tokenizer" (merge (dict "type" (include "diptych.sourceType" (dict "source" .))) .) }}
{{- end }}
{{- $models = ternary (prepend $models $entry) (append $models $entry) (eq (toString $name) $default) }}
{{- end }}
{{- end }}
{{- if not $models }}
{{- fail "models is empty: name a model, for example --set models.smollm2-135m.source.id=smollm2-135m" }}
{{- end }}
{{- toYaml (dict "models" $models) }}
{{- end }}

{{/* Refuses two caches, and a prefetch Job without a shared volume: (source, name). */}}
{{- define "diptych.checkCache" -}}
{{- if and .source.cacheVolume .source.cacheClaim }}
{{- fail (printf "models.%s.source has both cacheClaim %s, an existing claim, and cacheVolume, which the chart creates: use one of them" .name .source.cacheClaim) }}
{{- end }}
{{- if and .source.prefetch (not (or .source.cacheVolume .source.cacheClaim)) }}
{{- fail (printf "models.%s.source.prefetch needs a volume for all pods: set cacheVolume.size or cacheClaim" .name) }}
{{- end }}
{{- end }}

{{/* Model of a pool, as YAML: (root, name, for). */}}
{{- define "diptych.model" -}}
{{- $wanted := .name }}
{{- $models := (include "diptych.models" (dict "root" .root) | fromYaml).models }}
{{- $known := list }}
{{- $found := dict }}
{{- range $models }}
{{- $known = append $known .name }}
{{- if or (eq .name $wanted) (and (not $wanted) (eq (len $models) 1)) }}
{{- $found = . }}
{{- end }}
{{- end }}
{{- if not $found }}
{{- if $wanted }}
{{- fail (printf "%s names the model %q, but models has %s" .for $wanted (join ", " $known)) }}
{{- else }}
{{- fail (printf "%s must name its model, one of %s; or disable the pool with enabled: false" .for (join ", " $known)) }}
{{- end }}
{{- end }}
{{- toYaml $found }}
{{- end }}

{{/* A model for its router, as YAML: its source is that of its tokenizer, if there is one: (model). */}}
{{- define "diptych.routerView" -}}
{{- toYaml (set (mustDeepCopy .model) "source" (.model.tokenizer | default .model.source)) }}
{{- end }}

{{/* Default model of a pool: the model with the pool's name, or "": (root, pool). */}}
{{- define "diptych.modelOfName" -}}
{{- range (include "diptych.models" (dict "root" .root) | fromYaml).models }}
{{- if eq .name $.pool }}{{ .name }}{{ end }}
{{- end }}
{{- end }}

{{/* Removes all null values from a nested mapping, so that a pool can drop inherited values. */}}
{{- define "diptych.dropNulls" -}}
{{- range $key, $value := . }}
{{- if kindIs "invalid" $value }}{{ $_ := unset $ $key }}{{ else if kindIs "map" $value }}{{ include "diptych.dropNulls" $value }}{{ end }}
{{- end }}
{{- end }}

{{/* A pool merged with `workers` and the role's defaults, as YAML: (root, role, name, pool). */}}
{{- define "diptych.pool" -}}
{{- $role := index .root.Values .role }}
{{- $pool := mustMergeOverwrite (dict) (mustDeepCopy .root.Values.workers) (mustDeepCopy $role.defaults) (mustDeepCopy .pool) }}
{{- include "diptych.dropNulls" $pool }}
{{- $wanted := .pool.model | default (include "diptych.modelOfName" (dict "root" .root "pool" .name)) }}
{{- $model := include "diptych.model" (dict "root" .root "name" $wanted "for" (printf "%s pool %s" .role .name)) | fromYaml }}
{{- $isForeign := eq $pool.engine "vllm" }}
{{- if not (int $pool.startupSeconds) }}{{ $_ := set $pool "startupSeconds" (ternary 3600 1800 $isForeign) }}{{ end }}
{{- if not $pool.shm.size }}{{ $_ := set $pool.shm "size" (ternary "16Gi" "1Gi" $isForeign) }}{{ end }}
{{- $_ := set $pool "name" .name }}
{{- $_ := set $pool "model" $model.name }}
{{- toYaml $pool }}
{{- end }}

{{/* Merged pools of a role by name, as YAML {pools: [...]}; with a model, only its pools: (root, role, model). */}}
{{- define "diptych.pools" -}}
{{- $key := printf "diptychPools/%s/%s" .role (.model | default "") }}
{{- if not (hasKey .root $key) }}
{{- $_ := set .root $key (include "diptych.makePools" .) }}
{{- end }}
{{- get .root $key }}
{{- end }}

{{- define "diptych.makePools" -}}
{{- $given := (index .root.Values .role).pools }}
{{- if kindIs "slice" $given }}
{{- include "diptych.refuseList" (dict "list" $given "at" (printf "%s.pools" .role)) }}
{{- end }}
{{- $pools := list }}
{{- /* Without a model `helm template` stops earlier, but `helm lint` continues. */}}
{{- range $name, $pool := ternary $given dict (gt (len (include "diptych.models" (dict "root" .root) | fromYaml).models) 0) }}
{{- if not (or (kindIs "invalid" $pool) (eq (toString $pool.enabled) "false")) }}
{{- $pool := include "diptych.pool" (dict "root" $.root "role" $.role "name" (toString $name) "pool" $pool) | fromYaml }}
{{- if or (not $.model) (eq $pool.model $.model) }}
{{- $pools = append $pools $pool }}
{{- end }}
{{- end }}
{{- end }}
{{- toYaml (dict "pools" $pools) }}
{{- end }}

{{/* Engine of a model's pools: (root, model). */}}
{{- define "diptych.engineOf" -}}
{{- $engine := "diptych" }}
{{- range $role := list "prefill" "decode" }}
{{- range (include "diptych.pools" (dict "root" $.root "role" $role "model" $.model) | fromYaml).pools }}
{{- if eq .engine "vllm" }}{{ $engine = "vllm" }}{{ end }}
{{- end }}
{{- end }}
{{- $engine }}
{{- end }}

{{/* "true" if a pool of the model can scale to zero: (root, model). */}}
{{- define "diptych.scalesToZero" -}}
{{- range $role := list "prefill" "decode" }}
{{- range (include "diptych.pools" (dict "root" $.root "role" $role "model" $.model) | fromYaml).pools }}
{{- if and (has .autoscaling.type (list "keda" "planner")) (eq (int .autoscaling.minReplicas) 0) }}true{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Startup time, in seconds, of the slowest pool that can scale to zero, else 0: (root, model). */}}
{{- define "diptych.wakingSeconds" -}}
{{- $longest := 0 }}
{{- range $role := list "prefill" "decode" }}
{{- range (include "diptych.pools" (dict "root" $.root "role" $role "model" $.model) | fromYaml).pools }}
{{- if and (has .autoscaling.type (list "keda" "planner")) (eq (int .autoscaling.minReplicas) 0) }}{{ $longest = max $longest (int .startupSeconds) }}{{ end }}
{{- end }}
{{- end }}
{{- $longest }}
{{- end }}
